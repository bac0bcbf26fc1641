"""What callers may ask for: the keyword arguments of the clients, each where its field is in the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`. Left out or None: the server's default, which `stream.prompt` then shows."""

    model: str | None
    """Name of the model; needed only where the server has several."""
    request_id: str | None
    """Your own name for the request, unique among those in flight; `cancel` takes it."""
    messages: Sequence[Mapping[str, str]] | None
    """In place of a prompt: a conversation, such as [{"role": "user", "content": "你好"}]."""
    omit_generation_prompt: bool | None
    """Messages: end the prompt after the last one, instead of opening the assistant's turn."""
    priority: int | None
    """[-100, 100]; higher runs sooner."""
    temperature: float | None
    """[0, 100]; 0 = greedy."""
    top_k: int | None
    """Keep the k most likely tokens; 0 = off."""
    top_p: float | None
    """(0, 1]; 1 = off."""
    min_p: float | None
    """[0, 1); 0 = off."""
    typical_p: float | None
    """(0, 1]; 1 = off."""
    repetition_penalty: float | None
    """[0.01, 100], on tokens of prompt and output; 1 = off."""
    presence_penalty: float | None
    """[-2, 2], on tokens of the output; 0 = off."""
    frequency_penalty: float | None
    """[-2, 2], on tokens of the output for each time they occur; 0 = off."""
    logit_bias: Mapping[int, float] | None
    """Token id -> what is added to its logit, in [-100, 100]."""
    allowed_token_ids: Sequence[int] | None
    """The only ids that may be chosen."""
    n: int | None
    """[1, 64]; so many outputs of the one prompt, each chunk with its `index`."""
    seed: int | None
    """[0, 2^64); the same request with the same seed gives the same tokens."""
    max_new_tokens: int | None
    """0 = only run the prompt."""
    min_new_tokens: int | None
    """No end before this many tokens."""
    stop: str | Sequence[str] | None
    """Stop strings, matched on the output's text."""
    stop_token_ids: Sequence[int] | None
    include_stop_in_text: bool | None
    ignore_eos: bool | None
    """Go on past the model's end tokens."""
    time_limit: float | None
    """Seconds from admission; the stream then ends well, with finish "time_limit"."""
    json_schema: str | Mapping[str, Any] | None
    """The output must be JSON that this JSON Schema accepts. At most one such constraint goes with a request."""
    json_object: bool | None
    """The output must be a JSON object."""
    regex: str | None
    """The output must match this regular expression as a whole."""
    ebnf_grammar: str | None
    """The output must be a text of this grammar."""
    choices: Sequence[str] | None
    """The output must be one of these."""
    context: Literal["auto", "reject", "truncate", "roll", "reencode"] | None
    """What happens when prompt and output pass the trained context: docs/windows.md."""
    window_tokens: int | None
    """Under "roll" and "reencode": newest tokens that stay visible, at least 1."""
    sink_tokens: int | None
    """Under "roll" and "reencode": first tokens that stay visible for ever."""
    hop_tokens: int | None
    """Under "reencode": tokens dropped at a time, at most the window."""
    omit_special_tokens: bool | None
    """Text prompts: do not add BOS and the like."""
    parse_special_tokens: bool | None
    """Text prompts: spellings of special tokens become those tokens."""
    keep_special_tokens: bool | None
    """Leave special tokens in the text."""
    omit_text: bool | None
    omit_token_ids: bool | None
    return_prompt_token_ids: bool | None
    logprobs: int | None
    """Log-probabilities of the output's tokens, with so many of the likeliest ones beside each; 0 = the token alone."""
    logprob_token_ids: Sequence[int] | None
    """And with these beside each."""
    prompt_logprobs: int | None
    """The same for the prompt's tokens, in `stream.prompt`."""
    prompt_logprob_token_ids: Sequence[int] | None
    prompt_logprobs_start: int | None
    """Leave out the prompt's tokens before this one."""
    bypass_cache_read: bool | None
    """Compute the whole prompt, whatever is cached."""
    bypass_cache_write: bool | None
    """Keep nothing of this prompt for later ones."""
    cache_salt: str | None
    """Share computed prompts with requests of the same salt only."""
    delivery: Literal["incremental", "final"] | None
    """"final": one message at the end."""
    min_tokens_per_message: int | None
    """[1, 256]; a message is sent once at least so many have gathered. Unset: those of about 16 to 50 ms. 1: each as it
    comes, with what has come while the message before it was written. More: of a fast model, more."""
    timeout: float | None
    """Seconds, greater than 0; then DeadlineExceeded."""


class TokenizeOptions(TypedDict, total=False):
    """Keyword arguments of `tokenize`."""

    model: str | None
    omit_special_tokens: bool | None
    """Do not add BOS and the like."""
    parse_special_tokens: bool | None
    """Spellings of special tokens in the text become those tokens."""
    return_tokens: bool | None
    """Also the bytes that each token stands for."""
    timeout: float | None
    """Seconds; then DeadlineExceeded."""


class DetokenizeOptions(TypedDict, total=False):
    """Keyword arguments of `detokenize`."""

    model: str | None
    keep_special_tokens: bool | None
    """Leave special tokens in the text."""
    timeout: float | None
    """Seconds; then DeadlineExceeded."""
