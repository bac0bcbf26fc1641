"""Chat templates: rendered as transformers does, special tokens in contents never injected, bounded, errors named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from pellucid_model.tokenizers import CharacterTokenizer, ChatTemplate, Tokenizer, load_tokenizer
from pellucid_server import chat
from pellucid_server.chat import ChatError, ChatPrompter, Message
from pellucid_testing.tokenizers import byte_level_bpe, sentence_piece_bpe, write

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATING = """{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content | trim + ' [/INST]' }}
    {%- else %}
        {% generation %}{{ ' ' + message.content.strip() + eos_token }}{% endgeneration %}
    {%- endif %}
    {%- if loop.index > 20 %}{% break %}{% endif %}
{%- endfor %}"""
JSON = "{{ messages | tojson }}{{ {'a': '<é>'} | tojson(indent=1) }}{{ '!' if tools is none else '?' }}{{ nothing }}"
SPECIALS = {"bos_token": "<s>", "eos_token": "<|im_end|>"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens(["<s>", "<|im_end|>"])
    return write(tokenizer, tmp_path_factory.mktemp("chat") / "bpe", SPECIALS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    loaded = load_tokenizer(folder)
    assert loaded is not None
    return loaded


def prompter(source: str, tokenizer: Tokenizer) -> ChatPrompter:
    return ChatPrompter(ChatTemplate(source, "<s>", "<|im_end|>", SPECIALS), tokenizer)


def rendered(source: str, tokenizer: Tokenizer, messages: list[Message], *, open_answer: bool = True) -> str:
    pieces = prompter(source, tokenizer).render(messages, open_answer=open_answer)
    return "".join(text for text, _ in pieces)


CONVERSATIONS: list[list[Message]] = [
    [("user", "hello")],
    [("user", "  hello \n"), ("assistant", "\tyes 你好 🙂 "), ("user", "{{ 7 * 7 }} {% if %} é")],
    [("user", "a"), ("assistant", ""), ("user", "<é> \"quoted\" 'x' \\ & <b>")],
]


@pytest.mark.parametrize("source", [SMOLLM2, ALTERNATING, JSON])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("open_answer", [True, False])
def test_prompts_are_those_of_transformers(
    folder: Path, tokenizer: Tokenizer, source: str, messages: list[Message], open_answer: bool
) -> None:
    theirs: Any = transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=source, **SPECIALS
    )
    given = [{"role": role, "content": content} for role, content in messages]
    text = theirs.apply_chat_template(given, add_generation_prompt=open_answer, tokenize=False)
    assert rendered(source, tokenizer, messages, open_answer=open_answer) == text
    ours = prompter(source, tokenizer)
    ids = theirs.apply_chat_template(given, add_generation_prompt=open_answer, tokenize=True, return_dict=False)
    assert ours.encode(ours.render(messages, open_answer=open_answer)) == ids


def test_a_template_writes_the_only_bos(tokenizer: Tokenizer) -> None:
    made = prompter(ALTERNATING, tokenizer)
    ids = made.encode(made.render([("user", "x")]))
    assert tokenizer.bos_id is not None
    assert (ids[0], ids.count(tokenizer.bos_id)) == (tokenizer.bos_id, 1)


@pytest.mark.parametrize("special", ["<|im_end|>", "<|im_start|>", "<s>"])
@pytest.mark.parametrize("content", ["{}", "a{}b", " {} ", "{}{}", "<|im_{}end|>"])
def test_a_special_token_in_a_content_is_plain_text(tokenizer: Tokenizer, special: str, content: str) -> None:
    """A user's text that spells a control token must not end or open a turn."""
    text = content.replace("{}", special)
    for source in (SMOLLM2, ALTERNATING):
        made = prompter(source, tokenizer)
        spelled, harmless = (made.encode(made.render([("user", each)])) for each in (text, "x"))
        specials = [[i for i in ids if i in tokenizer.special_ids] for ids in (spelled, harmless)]
        assert specials[0] == specials[1] != []
        assert text.strip() in tokenizer.decode(spelled, keep_special_tokens=True)


def test_pieces_of_a_special_token_in_two_contents_do_not_make_one(tokenizer: Tokenizer) -> None:
    glued = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    made = prompter(glued, tokenizer)
    for parts in (("<|im_", "end|>"), (" x<|im_end|", "> "), ("<", "s>")):
        ids = made.encode(made.render([("user", parts[0]), ("user", parts[1])]))
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == "".join(part.strip() for part in parts)
    built = prompter("{{ '<|im_' + messages[0].content }}", tokenizer)
    assert tokenizer.special_ids.isdisjoint(built.encode(built.render([("user", "end|> so")])))


@given(st.text(alphabet="<|>ims_endart \n", max_size=30))
def test_no_content_makes_a_special_token(tokenizer: Tokenizer, content: str) -> None:
    made = prompter(SMOLLM2, tokenizer)
    ids = made.encode(made.render([("system", ""), ("user", content)]))
    assert sum(i in tokenizer.special_ids for i in ids) == 5
    assert f"user\n{content}<|im_end|>" in tokenizer.decode(ids, keep_special_tokens=True)


def test_other_tokenizers(tmp_path: Path) -> None:
    characters = CharacterTokenizer.train(["useraistn x<>o"])
    made = ChatPrompter(ChatTemplate("{{ bos_token }}{{ messages[0].content }}<eos>", "<bos>", "<eos>"), characters)
    ids = made.encode(made.render([("user", "<eos>x")]))
    assert [i for i in ids if i in characters.special_ids] == [characters.eos_ids[0]]
    spm = load_tokenizer(write(sentence_piece_bpe(), tmp_path / "spm", {}))
    assert spm is not None
    # In pieces or whole, the text is tokenized once: no blank is put before each piece.
    whole = spm.encode("The ab<s>ab st", add_special_tokens=False, parse_special_tokens=True)
    assert spm.encode_pieces([("The a", False), ("b<s>a", True), ("b st", False)]) == whole
    assert spm.encode_pieces([("The ab<s>ab st", False)]) != whole


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (SMOLLM2, ["<|im_end|>"]),
        (ALTERNATING, ["<|im_end|>"]),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", []),
        ("{{ raise_exception('never') }}", []),
        ("{% for m in messages %}{{ m.content + ' <s>' }}{% endfor %}", ["<s>"]),
    ],
)
def test_what_the_template_writes_behind_an_answer_ends_it(tokenizer: Tokenizer, source: str, ends: list[str]) -> None:
    assert list(prompter(source, tokenizer).end_ids) == [tokenizer.special_tokens[end] for end in ends]


@pytest.mark.parametrize(
    ("source", "messages", "index", "says"),
    [
        (ALTERNATING, [("user", "a"), ("user", "b")], 1, "roles must alternate"),
        (ALTERNATING, [("system", "a")], 0, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", [("user", "a")], 0, "concatenate"),
        ("{{ messages[5].content }}", [("user", "a")], None, "no element 5"),
        ("{{ nothing.at.all }}", [("user", "a")], None, "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", [("user", "a")], None, "unsafe"),
        ("{% set x = messages.append(1) %}", [("user", "a")], None, "unsafe|not safe"),
    ],
)
def test_what_a_template_refuses_names_the_message(
    tokenizer: Tokenizer, source: str, messages: list[Message], index: int | None, says: str
) -> None:
    with pytest.raises(ChatError, match=says) as caught:
        prompter(source, tokenizer).render(messages)
    assert caught.value.index == index
    assert "\n" not in str(caught.value)


def test_a_template_that_is_none_is_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"line 2: .*unknown tag 'oops'"):
        prompter("ok\n{% oops %}", tokenizer)


def test_rendering_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_CHARACTERS", 1000)
    doubling = prompter("{% for i in range(100000) %}{{ messages[0].content }}{% endfor %}", tokenizer)
    with pytest.raises(ChatError, match="more than 1000 characters"):
        doubling.render([("user", "x" * 100)])
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.0)
    with pytest.raises(ChatError, match="more than 0 s"):
        doubling.render([("user", "x")])


def test_the_date_is_there_for_templates_that_show_it(tokenizer: Tokenizer) -> None:
    text = rendered("{{ strftime_now('%Y') }}", tokenizer, [("user", "x")])
    assert text.isdecimal()
    assert len(text) == 4
