"""How a page looks: colors of day and night, phones, paper. Part of every page, so that it needs nothing but itself."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #faf7f2; --card: #fffefb; --ink: #231c16; --quiet: #6b5f54; --line: #e3dacd; --ember: #b8480f;
  --blue: #1d6a86; --gray: #978a7b; --asked: #f6e3d5; --right: #2a6b3d; --wrong: #9d1c1c;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #161310; --card: #211c18; --ink: #ece4da; --quiet: #a79a8c; --line: #3a3129; --ember: #f2935a;
    --blue: #79c3e0; --gray: #74695e; --asked: #472a19; --right: #8fd19e; --wrong: #ffa69e;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 3rem; max-width: 78rem;
  background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; }
a { color: var(--ember); text-underline-offset: .15em; }
h1 { margin: 0; font-size: clamp(1.8rem, 5vw, 2.6rem); line-height: 1.15; overflow-wrap: anywhere; }
h2 { margin: 0 0 1rem; padding-top: 1.2rem; border-top: 1px solid var(--line); font-size: 1.45rem; break-after: avoid; }
h3, h4 { margin: 1.6rem 0 .6rem; font-size: 1.05rem; break-after: avoid; }
h4 { font-size: .95rem; color: var(--quiet); }
section { margin-bottom: 2.6rem; }
header { margin-bottom: 1.6rem; }
.over { letter-spacing: .08em; text-transform: uppercase; }
nav ol { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 0 0 2rem; padding: 0; list-style: none; }
nav { font-size: .92rem; }
header p, .note, .missing { color: var(--quiet); font-size: .9rem; margin: .5rem 0; }
dl, dd, .card { margin: 0; min-width: 0; }
.facts { display: flex; flex-wrap: wrap; gap: .6rem 2.2rem; margin-bottom: 1.2rem; }
.facts dd { font-size: 1.2rem; }
.tiles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .9rem; }
.tile, .card { padding: .9rem 1.1rem; border: 1px solid var(--line); border-radius: .8rem; background: var(--card); }
.tile h3 { margin: 0; font-size: .92rem; font-weight: 500; color: var(--quiet); }
.tile .note { margin: .5rem 0 0; font-size: .85rem; line-height: 1.4; }
.big { margin: .1rem 0 0; font-size: 2.2rem; font-weight: 650; line-height: 1.2; }
.wrong { color: var(--wrong); border-color: var(--wrong); }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(18rem, 100%), 1fr)); gap: 0 1.5rem; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .4rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
td { white-space: nowrap; }
.under { display: block; font-size: .9em; color: var(--quiet); }
th { font-weight: 500; }
thead th, dt { font-size: .82rem; color: var(--quiet); vertical-align: bottom; }
th:first-child { padding-left: 0; text-align: left; }
.commands :is(th, td) { text-align: left; }
.commands td:last-child { min-width: 13rem; white-space: normal; }
code { font-size: .88em; overflow-wrap: anywhere; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: .9rem; }
.wide { grid-template-columns: 100%; }
.tagged { display: flex; flex-wrap: wrap; gap: 0 .8rem; margin: 0 0 .6rem;
  justify-content: space-between; font-size: .85rem; color: var(--quiet); }
.tagged b { color: var(--ember); overflow-wrap: anywhere; }
.quote { margin: 0; font: .84rem/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark.learned { background: var(--asked); color: inherit; border-radius: .2rem; box-decoration-break: clone; }
.unlearned { color: var(--quiet); }
.special { font-weight: 650; color: var(--blue); }
.tiles + .facts { margin-top: 1.4rem; }
.legend + .cards { margin-top: .8rem; }
.talk { display: flex; flex-direction: column; gap: .5rem; }
.bubble { align-self: flex-start; max-width: 92%; margin: 0; padding: .45rem .8rem; font-size: .92rem;
  border: 1px solid var(--line); border-radius: .3rem 1rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.bubble.user { align-self: flex-end; border: 0; border-radius: 1rem 1rem .3rem; background: var(--asked); }
.who { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.verdict { margin: .7rem 0 0; font-size: .88rem; font-weight: 500; overflow-wrap: anywhere; }
.right { color: var(--right); }
.chips { display: flex; flex-wrap: wrap; gap: .4rem; margin: 0; padding: 0; list-style: none; }
.chips li { padding: .1rem .6rem; border: 1px solid var(--line); border-radius: 1rem; background: var(--card);
  font: .85rem ui-monospace, monospace; white-space: pre-wrap; }
summary { margin: .9rem 0; cursor: pointer; color: var(--ember); }
footer { padding-top: 1.2rem; border-top: 1px solid var(--line); }
.foot { display: flex; flex-wrap: wrap; gap: .5rem 1.8rem; font-size: .85rem; }
@media screen and (min-width: 70rem) {
  body { display: grid; grid-template-columns: 13rem minmax(0, 1fr); gap: 0 3rem; }
  header, footer { grid-column: 1 / -1; }
  nav ol { position: sticky; top: 1.5rem; flex-direction: column; gap: .45rem; }
  .tiles { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  article .quote { max-height: 14rem; overflow: auto; }
  section:first-child h2 { border-top: 0; padding-top: 0; }
}
@media print {
  :root { --paper: #fff; --card: #fff; font-size: 10pt; }
  body { padding: 0; }
  * { print-color-adjust: exact; }
  figure, tr, .tile, .card { break-inside: avoid; }
  details::details-content { content-visibility: visible; height: auto; }
}
figure { margin: 1.2rem 0 .5rem; }
figcaption { font-weight: 600; margin-bottom: .6rem; }
svg { display: block; overflow: visible; }
svg text { font-size: .75rem; fill: var(--quiet); text-anchor: middle; }
svg text.row { text-anchor: end; }
svg text.first { text-anchor: start; }
svg .grid { stroke: var(--line); stroke-width: 1; }
.plot { width: calc(100% - 4.2rem); height: 15rem; margin: 1.9rem .8rem 3.1rem 3.4rem; }
.small .plot { height: 8rem; }
.small polyline { stroke-width: 1.2; }
polyline { fill: none; stroke: var(--ember); stroke-width: 2; vector-effect: non-scaling-stroke; }
polyline.faint { stroke-width: 1; opacity: .45; }
.dot { fill: var(--blue); stroke: var(--paper); stroke-width: 1; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: 0; font-size: .85rem; color: var(--quiet); }
.key i { display: inline-block; width: 1.3rem; margin-right: .45rem; border-top: 3px solid var(--ember); }
.key i { vertical-align: .22em; }
.key i.faint { border-top-width: 1px; opacity: .6; }
.key i.dots { width: .55rem; height: .55rem; border: 0; border-radius: 50%; background: var(--blue); }
.key i:not(.faint, .strong) { vertical-align: -.05em; }
.key i.mark { width: 0; height: .9rem; border: 0; border-left: 2px solid var(--ink); }
.heat rect { fill: var(--ember); shape-rendering: crispEdges; }
.heat .plot { width: calc(100% - 6.2rem); margin-left: 5.4rem; }
.key i.scale { width: 6rem; height: .8rem; border: 0; vertical-align: -.1em;
  background: linear-gradient(to right, rgb(from var(--ember) r g b / .06), var(--ember)); }
.bars { display: grid; align-items: center; gap: 0 .9rem; }
.bars { grid-template-columns: fit-content(18rem) minmax(5rem, 1fr) auto; }
.bars > div { display: contents; }
.bars figcaption { grid-column: 1 / -1; }
.bars span { font-size: .9rem; line-height: 1.3; }
.bars .name { min-width: 7rem; overflow-wrap: anywhere; }
.bar { width: 100%; height: 1.5rem; }
.scale { grid-column: 2; width: 100%; height: 2.7rem; }
.bar-fill { fill: var(--ember); }
.bar-fill.quiet { fill: var(--gray); }
.mark { stroke: var(--ink); stroke-width: 2; }
.interval { width: calc(100% - 2.4rem); height: 2.3rem; margin: .7rem 1.2rem 0; }
.reach { stroke: var(--ember); stroke-width: 6; stroke-linecap: round; opacity: .4; }
.middle { fill: var(--ember); }
td .bar { display: inline-block; width: clamp(3rem, 8vw, 7rem); height: 1.1rem; margin-left: .7rem; }
td .bar { vertical-align: middle; }
@media (max-width: 38rem) {
  .tiles { grid-template-columns: 100%; }
  .commands td { min-width: 9rem; white-space: normal; }
  .bars { grid-template-columns: minmax(0, 1fr) auto; }
  .bars .name { grid-column: 1 / -1; margin-top: .3rem; }
  .scale { grid-column: 1; }
  td .bar { display: block; width: 4.5rem; margin: 0 0 0 auto; }
}
"""
