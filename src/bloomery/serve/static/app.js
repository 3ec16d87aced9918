// The page: asks /v1/chat/completions, and shows the answer as it arrives. All text goes in as text, never as HTML.

const byId = (id) => document.getElementById(id);
const page = document.querySelector("main");
const [picker, conversation, welcome, question] = ["model", "conversation", "welcome", "question"].map(byId);
const [sendButton, stopButton, temperature, longest] = ["send", "stop", "temperature", "longest"].map(byId);

let messages = []; // what the next request sends
let answeredBy = null; // the model of the last answer
let running = null; // an AbortController while an answer arrives
let atEnd = true; // whether the reader sees the end of the conversation

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function stayAtEnd() {
  if (atEnd) page.scrollTop = page.scrollHeight;
}

function show(change) {
  change();
  stayAtEnd();
}

function addMessage(role, text, who) {
  const message = make("article", `message ${role}`);
  const parts = { message, text: make("div", "text", text), facts: make("div", "facts") };
  if (who) message.append(make("div", "who", who));
  else message.setAttribute("aria-label", "You");
  message.append(parts.text, parts.facts);
  welcome.hidden = true;
  show(() => conversation.append(message));
  return parts;
}

function addTrouble(what, again) {
  const trouble = make("div", "trouble");
  trouble.setAttribute("role", "alert");
  const button = make("button", "again", "Try again");
  button.type = "button";
  button.addEventListener("click", () => {
    trouble.remove();
    again();
  });
  trouble.append(make("p", "", what), button);
  show(() => conversation.append(trouble));
}

// An old question cannot be asked again once the conversation has gone on.
const settleTroubles = () => conversation.querySelectorAll(".again").forEach((button) => button.remove());

// Server-sent events: blocks of lines, an empty line between them. A block may arrive in several reads.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (waiting + value).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data) yield data;
    }
  }
}

async function failure(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`);
}

async function request(model, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    signal,
    body: JSON.stringify({
      model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      truncation: "oldest",
      temperature: Number(temperature.value),
      max_tokens: Math.max(1, Math.floor(Number(longest.value)) || 512),
    }),
  });
  if (!response.ok) throw await failure(response);
  return response;
}

// Read one answer into its place. What has arrived stays in `got`, also when this throws.
async function receive(got, place, signal) {
  for await (const data of events(await request(got.model, signal))) {
    if (data === "[DONE]") {
      got.whole = true;
      return;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    if (event.usage) got.tokens = event.usage.completion_tokens;
    if (event.dropped_messages) got.dropped = event.dropped_messages;
    const choice = event.choices[0];
    if (choice?.finish_reason) got.finish = choice.finish_reason;
    if (!choice?.delta.content) continue;
    got.began ??= performance.now();
    got.pieces += 1;
    got.text += choice.delta.content;
    show(() => place.text.append(choice.delta.content));
  }
  throw new Error("The connection ended before the answer was complete.");
}

function facts(got) {
  const counted = got.tokens ?? got.pieces;
  const seconds = (performance.now() - got.began) / 1000;
  const said = [`${got.tokens === null ? "about " : ""}${counted} ${counted === 1 ? "token" : "tokens"}`];
  // The first token also waits for the question to be read, so the pace is that of the others.
  if (counted > 1 && got.began !== null && seconds > 0) {
    const speed = Number(((counted - 1) / seconds).toPrecision(3)); // 1,330 and not 1.33e+3
    said.push(`${speed.toLocaleString("en")} tokens/s`);
  }
  if (got.finish === "length") said.push("truncated at the maximum length");
  if (got.dropped) said.push(`the oldest ${got.dropped} messages did not fit`);
  if (got.stopped) said.push("stopped");
  return said.join(" · ");
}

async function answer() {
  const control = new AbortController();
  const got = { model: picker.value, text: "", pieces: 0, tokens: null, began: null, finish: null, stopped: false, dropped: 0 };
  const place = addMessage("assistant", "", got.model);
  answeredBy = got.model;
  place.message.classList.add("streaming");
  place.message.setAttribute("aria-busy", "true");
  setRunning(control);
  let trouble = null;
  try {
    await receive(got, place, control.signal);
  } catch (error) {
    got.stopped = control.signal.aborted;
    trouble = got.stopped ? null : error.message;
  }
  place.message.classList.remove("streaming");
  place.message.removeAttribute("aria-busy");
  if (running !== control) return; // a new conversation has begun
  setRunning(null);
  if (got.stopped && !got.text) trouble = "Stopped before the first word.";
  if (got.text || got.whole) show(() => (place.facts.textContent = facts(got)));
  if (trouble === null) messages.push({ role: "assistant", content: got.text });
  else fail(place, got, trouble);
}

// A question without an answer leaves the conversation, and comes back when it is asked again.
function fail(place, got, trouble) {
  const unanswered = messages.pop();
  if (!got.text) place.message.remove();
  addTrouble(trouble, () => {
    place.message.remove();
    messages.push(unanswered);
    answer();
  });
}

function setRunning(control) {
  running = control;
  stopButton.hidden = control === null;
  sendButton.hidden = control !== null;
  if (control === null && document.activeElement === document.body) question.focus();
}

function ask() {
  const text = question.value.trim();
  if (!text || running || picker.disabled) return;
  settleTroubles();
  question.value = "";
  fitQuestion();
  messages.push({ role: "user", content: text });
  atEnd = true;
  addMessage("user", text);
  answer();
}

function begin() {
  running?.abort();
  setRunning(null);
  messages = [];
  answeredBy = null;
  conversation.replaceChildren(welcome);
  welcome.hidden = false;
  question.focus();
}

// One line where the model changes; changing back before anything was asked takes it away.
function markSwitch() {
  if (conversation.lastElementChild?.classList.contains("switch")) conversation.lastElementChild.remove();
  if (answeredBy === null || answeredBy === picker.value) return;
  show(() => conversation.append(make("p", "switch", `${picker.value} answers from here on`)));
}

function fitQuestion() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight}px`;
  sendButton.disabled = picker.disabled || !question.value.trim();
}

async function findModels() {
  try {
    const response = await fetch("/v1/models");
    if (!response.ok) throw await failure(response);
    const names = (await response.json()).data.map((model) => model.id);
    picker.replaceChildren(...names.map((name) => new Option(name, name)));
    picker.disabled = names.length === 0;
    if (names.length === 0) {
      picker.append(new Option("no model"));
      byId("hint").textContent = "No run folder holds a model yet. Train a model with “bloomery run”, then reload this page.";
    }
  } catch (error) {
    addTrouble(`Could not load the list of models: ${error.message}`, findModels);
  }
  fitQuestion();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
});
question.addEventListener("input", fitQuestion);
page.addEventListener("scroll", () => (atEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 60));
new ResizeObserver(stayAtEnd).observe(page);
stopButton.addEventListener("click", () => running?.abort());
byId("new").addEventListener("click", begin);
picker.addEventListener("change", markSwitch);
temperature.addEventListener("input", () => (byId("temperature-value").textContent = Number(temperature.value).toFixed(1)));
findModels();
