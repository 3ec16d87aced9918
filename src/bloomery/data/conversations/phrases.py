"""Phrases that filters of conversations look for, in English and Chinese."""

import re
from collections.abc import Sequence

OTHER_MODELS = (
    *("ChatGPT", "GPT-4", "GPT-3", "GPT-3.5", "GPT4", "GPT", "OpenAI", "Claude", "Anthropic", "Bard", "Gemini"),
    *("PaLM", "LaMDA", "DeepMind", "Bing Chat", "Copilot", "Vicuna", "LMSYS", "Alpaca", "LLaMA", "Koala"),
    *("WizardLM", "Mistral", "Mixtral", "Qwen", "Tongyi", "DeepSeek", "Ernie", "ChatGLM", "Open Assistant"),
    *("Large Model Systems Organization", "通义千问", "文心一言", "智谱"),
)
"""Names that other assistants, and who makes them, are known by."""


def _any(*phrases: str) -> str:
    """One of several expressions."""
    return f"(?:{'|'.join(phrases)})"


def _compiled(*phrases: str) -> re.Pattern[str]:
    """An apostrophe stands for both kinds of it."""
    return re.compile(_any(*phrases).replace("'", "['’]"), re.IGNORECASE)


AI = _any("ai", "artificial intelligence", r"a\.i\.")
MODEL = _any("language model", "model", "assistant", "chatbot", "system", "program", "developed", "trained", "created")
I_AM = _any(r"\bi am", r"\bi'm")
MACHINE = (
    rf"\b(?:as|being) an? {AI}(?:[,.]| {MODEL}\b| i\b)",
    r"\b(?:as|being) an? (?:large |ai )?language model\b",
    rf"{I_AM} (?:just |only |simply )?an? (?:{AI}|large language model|language model|chatbot)\b",
    r"\bmy (?:training data|knowledge cut-?off)\b",
    r"(?:作为|我是)(?:一[个名款])?(?:人工智能|AI|大?语言模型|大模型|聊天机器人)",
)
"""What tells that the one who speaks is a machine that others made."""


def identity(names: Sequence[str]) -> re.Pattern[str]:
    """What an assistant says that tells of another one, or of being a machine."""
    if not names:
        return _compiled(*MACHINE)
    listed = f"(?:{'|'.join(re.escape(name) for name in sorted(names, key=len, reverse=True))})"
    called = _any(r"\bi am", r"\bi'm", r"\bmy name is", r"\bcall me", r"\brefer to me as", r"\bthis is")
    made = _any("created", "developed", "trained", "made", "built", "designed", "fine-tuned")
    few = r"[^.!?\n]{0,60}?"
    return _compiled(
        *MACHINE,
        rf"{called} (?:an? |the )?{listed}\b",
        rf"{_any('i', 'model', 'assistant', 'ai')}\b{few}\b{made}\b{few}\bby\b{few}\b{listed}",
        rf"我(?:是|叫){listed}",
        rf"由\s?{listed}[^。！？\n]{{0,10}}(?:训练|开发|研发|创建)",
    )


SORRY = _any(r"(?:i'm|i am) (?:very |really |so )?sorry", "sorry", "i apologi[sz]e", "my apologies", "unfortunately")
CANNOT = _any("can't", "cannot", "can not", "am unable to", "am not able to", "won't", "will not", "do not", "don't")
DO = _any(
    *("help", "assist", "provide", "answer", "do that", "fulfil", "fulfill", "comply", "support", "create", "write"),
    *("generate", "engage", "access", "browse", "give", "offer", "have access", "have the ability"),
)
NOT_ABLE = _any("cannot", "can't", "not able", "unable", "do not", "don't")

OPENINGS = {
    "refusal": _compiled(
        rf"{SORRY}[^.!?\n]{{0,80}}\b{NOT_ABLE}\b",
        rf"i {CANNOT} (?:be able to )?{DO}\b",
        r"i'm (?:unable|not able) to\b",
        rf"as an? (?:{AI}|language model|responsible)[^.!?\n]{{0,80}}{NOT_ABLE}",
        r"(?:很)?(?:抱歉|对不起)[，,。]?\s*(?:但|我|作为|无法|这)",
        r"我(?:无法|不能|没有办法)(?:回答|提供|帮助|满足|协助)",
    ),
    "hedge": _compiled(
        r"as of my (?:last|latest|most recent|current) (?:\w+ )?(?:update|training|knowledge)",
        r"(?:it is|it's) (?:difficult|hard|impossible|not possible) to (?:say|determine|answer|know|give)",
        r"there is (?:no|not a) (?:definitive|single|simple|clear|one)[^.!?\n]{0,20}answer",
        r"without (?:more|further|additional|any) (?:context|information|details)",
        r"(?:it is|it's) (?:important|worth) (?:to (?:note|remember|understand|mention)|noting|mentioning)",
        r"i'm not (?:entirely |quite |really |exactly |completely )?sure\b",
        r"(?:截至|截止)(?:到)?我的(?:知识|训练|最后)",
    ),
}
"""How an answer opens that refuses, or that puts off what it says."""

ENDED = re.compile(
    r"(?:[.!?…。！？；”’」』）】》\"')\]}>*_`~|:：;$%°€£¥=+^/\\-]"
    r"|[\U0001F300-\U0001FAFF\u2600-\u27BF][\uFE0F\u200D]*)\s*\Z"
)
"""The end of a text that was finished: a mark, something closed, code, a formula, a smiley."""
ADDRESS = re.compile(r"(?:https?://|www\.)\S")
NUMBER = re.compile(r"[^A-Za-z]*\d(?:st|nd|rd|th|s)?")
"""A last word that ends a text without a mark: with an address in it, or a number, maybe with signs around it."""
LISTED = re.compile(
    r"\s*(?:[-*•+]|\d+[.)]|[a-zA-Z][.)]|\|)\s|\s*#{1,6}\s|\s{4,}\S|\s*https?://|[^.!?\n]{1,40}:\s|.{0,60}\d\W*\Z"
)
"""A last line that need not end in a mark: an item of a list, a heading, code, an address, a name with its value."""

SPAM = _compiled(
    *(r"\bclick (?:here|the link|below)\b", r"\b(?:buy|order|act|call) now\b", r"\blimited[- ]time offer\b"),
    *(r"\bfree (?:trial|shipping|gift)\b", r"\bsubscribe (?:to|now)\b", r"\bfollow us on\b", r"\b100% free\b"),
    *(r"\bsign up (?:now|today)\b", r"\bvisit our (?:website|store|page)\b", r"\bmoney[- ]back guarantee\b"),
    *(r"\b(?:promo(?:tional)?|discount) code\b", r"\bcheap (?:pills|viagra)\b", r"\bmake money (?:fast|online)\b"),
    *(r"\bcasino bonus\b", r"\bwhatsapp (?:me|us)\b", "加微信", "扫码关注", "点击链接", "限时优惠"),
)
LINK = _compiled(r"https?://", r"\bwww\.")
LEFTOVER = re.compile(
    r"#\s?(?:The )?(?:Given|Rewritten|Created|New|Original) Prompt\s?#?"
    r"|\b(?:The )?(?:Given|Rewritten) Prompt#?:"
    r"|#{2,3} ?(?:Instruction|Response|Human|Assistant) ?:"
    r"|<\|(?:im_start|im_end|endoftext|eot_id|assistant|user|system|prompter|end_of_turn)\|>"
    r"|\[/?INST\]|<<SYS>>"
)
"""Marks of prompts, written as they were written there."""
