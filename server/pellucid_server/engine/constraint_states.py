"""Follows constraints while tokens are sampled: which ids may come next, and whether the output may end.

In: a constraint, the tokenizer, then an output's tokens. Out: for each step one bit per id. A grammar is compiled once
and kept for others that ask for the same; each sequence has a state of its own, made from its constraint and its output
alone. So it is the same after a preemption, in a new engine, and for each of several outputs of one prompt.

Two threads work beside the step loop, so that it waits for neither: one compiles, one computes the next step's bits
while the model runs. The library releases the interpreter's lock in both.

Ids that end the output (EOS, stop ids) may come exactly where the constraint lets it end; other special tokens never.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pellucid_model.tokenizers import Tokenizer
from pellucid_server.engine.constraints import STACK_BYTES, fault_of, new_matcher, to_grammar
from pellucid_server.engine.messages import Constraint
from pellucid_server.settling import give_back_freed

if TYPE_CHECKING:
    import llguidance

CACHED_GRAMMARS = 32
"""Compiled grammars that are kept, the last used ones."""
_LEXER_FULL = "too many states"


@dataclass(frozen=True, eq=False)
class Grammar:
    """A constraint as it was compiled. `matcher` stays at the beginning of an output."""

    constraint: Constraint
    matcher: llguidance.LLMatcher
    vocab_size: int


class ConstraintState:
    """One output's place in its constraint.

    grammar        compiled
    renew          compiles the grammar again
    prompt_length  where the output begins in its sequence
    end_ids        those that end the output

    permitted  uint32 [ceil((V + 1) / 32)], filled by compute(): bit i tells whether id i may come next
    """

    def __init__(
        self, grammar: Grammar, renew: Callable[[Grammar], Grammar], prompt_length: int, end_ids: Collection[int]
    ) -> None:
        self.permitted: npt.NDArray[np.uint32] = np.zeros(grammar.vocab_size // 32 + 1, np.uint32)
        self._grammar = grammar
        self._renew = renew
        self._matcher = grammar.matcher.deep_copy()
        self._end_ids = [i for i in end_ids if i < grammar.vocab_size]
        self._prompt_length = prompt_length
        self._output: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Take what the sequence, prompt and output, has more than the last time."""
        new = list(tokens[self._prompt_length + len(self._output) :])
        self._matcher.consume_tokens(new)
        self._output += new

    def accept(self, token: int) -> None:
        """Take one token more. Those that end the output are no part of it."""
        self._matcher.consume_token(token)
        self._output.append(token)

    def compute(self) -> None:
        """Fill `permitted` for the next token. May run in another thread."""
        words = self.permitted
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if _LEXER_FULL in self._matcher.get_error():
            # All that follow a grammar share the memory of its lexer. Others may have filled it, long before.
            self._grammar = self._renew(self._grammar)
            self._matcher = self._grammar.matcher.deep_copy()
            self._matcher.consume_tokens(self._output)
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        for i in self._end_ids:
            bit = np.uint32(1 << (i % 32))
            words[i // 32] = words[i // 32] | bit if self.accepting else words[i // 32] & ~bit

    @property
    def accepting(self) -> bool:
        """Whether the output as it is matches."""
        return self._matcher.is_accepting()

    @property
    def exhausted(self) -> bool:
        """Whether nothing can follow. The output is complete then; or it cannot be completed, if it does not match."""
        return self._matcher.is_stopped()

    @property
    def fault(self) -> str:
        """Why nothing can follow an output that is not complete; "" where something can."""
        return fault_of(self._matcher) if self._matcher.is_error() else ""


class Constraints:
    """The constraints of one engine.

    load_tokenizer  called once, with the first constraint
    vocab_size      ids from here on are never permitted
    """

    def __init__(self, load_tokenizer: Callable[[], Tokenizer | None], vocab_size: int) -> None:
        self._load_tokenizer = load_tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._computer = ThreadPoolExecutor(1, "compute-constraints")

    @functools.cached_property
    def _compiler(self) -> ThreadPoolExecutor:
        """One thread, on a deep stack. The setting concerns all threads that start from now on: it is soon undone."""
        ordinary = threading.stack_size(STACK_BYTES)
        executor = ThreadPoolExecutor(1, "compile-constraints")
        executor.submit(int)
        threading.stack_size(ordinary)
        return executor

    def prepare(self, constraint: Constraint, spent: Grammar | None = None) -> Future[Grammar]:
        """Compile beside the caller. The future raises ValueError, with one line, where the constraint has a fault.

        spent  is not to be handed out again
        """
        return self._compiler.submit(self._compile, constraint, spent)

    def new_state(self, constraint: Constraint, prompt_length: int, end_ids: Collection[int]) -> ConstraintState:
        """The state at the beginning of an output; fast where the constraint has been prepared. Raises ValueError."""
        with self._lock:
            grammar = self._grammars.get(constraint)
        return ConstraintState(grammar or self.prepare(constraint).result(), self._renew, prompt_length, end_ids)

    def compute(self, states: Sequence[ConstraintState]) -> Future[None]:
        """Fill the states' bits beside the caller."""
        return self._computer.submit(_compute, states)

    def _renew(self, spent: Grammar) -> Grammar:
        return self.prepare(spent.constraint, spent).result()

    def _compile(self, constraint: Constraint, spent: Grammar | None) -> Grammar:
        with self._lock:
            grammar = self._grammars.get(constraint)
            if grammar is not None and grammar is not spent:
                self._grammars.move_to_end(constraint)
                return grammar
        if self._vocabulary is None:
            self._vocabulary = _read_vocabulary(self._load_tokenizer(), self._vocab_size)
            give_back_freed()  # The tokenizer was read for its tokens' bytes alone.
        grammar = Grammar(constraint, new_matcher(self._vocabulary, to_grammar(constraint)), self._vocab_size)
        with self._lock:
            self._grammars[constraint] = grammar
            self._grammars.move_to_end(constraint)
            if len(self._grammars) > CACHED_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar


def _compute(states: Sequence[ConstraintState]) -> None:
    for state in states:
        state.compute()


class _Vocabulary:
    """The tokens' bytes as the library wants them, with an end token of its own behind them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b""]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*(i for i in sorted(tokenizer.special_ids) if i < vocab_size), vocab_size]

    def __call__(self, text: bytes) -> list[int]:
        """Nothing asks for the tokenizer's own division of a text."""
        return []


def _read_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> llguidance.LLTokenizer:
    import llguidance

    if tokenizer is None:
        raise ValueError("needs a tokenizer, and the checkpoint has none")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size)))
