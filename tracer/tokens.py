"""From the ids that a call took and gave to token rows, counts by step, and why it stopped."""

import bisect
import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from lifetrace.analysis.schema import PHASES
from lifetrace.hooks.recorder import Call, Step

from .logprobs import Sequence

UNKNOWN = -1


@dataclass(frozen=True)
class StepTokens:
    """New tokens that a step gave, how many of those it processed are not padding, whether they were undone.

    A stop check that is read a step late lets one forward more begin, whose token is taken back.
    """

    token_count: int | None
    tokens_real: int | None
    undone: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What token rows need to know of a step."""

    step: int
    end_ns: int
    phase: str
    batch: int | None
    q_len: int | None
    kv_len_before: int | None
    kv_len_after: int | None
    length_after: int | None


class StepLog:
    """The steps of a call, kept as numbers side by side: a run may have very many of them."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, facts: StepFacts) -> None:
        """Keep a step."""
        self._numbers.extend(_number(getattr(facts, name)) for name in StepFacts.__slots__)

    def __iter__(self) -> Iterator[StepFacts]:
        width = len(StepFacts.__slots__)
        for start in range(0, len(self._numbers), width):
            step, end_ns, phase, *others = self._numbers[start : start + width]
            yield StepFacts(step, end_ns, PHASES[phase], *(None if n == UNKNOWN else n for n in others))


def _number(fact: int | str | None) -> int:
    if isinstance(fact, str):
        return PHASES.index(fact)
    return UNKNOWN if fact is None else fact


@dataclass
class CallTokens:
    """The tokens of one call on the host: ids by sequence, where the prompt ends, what is real."""

    ids: list[list[int]]
    prompt_length: int
    mask: list[list[int]] | None
    eos: frozenset[int]
    ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ends = [self._end(row) for row in self.ids]

    def _end(self, row: list[int]) -> int:
        """Where a sequence's text ends: behind its first end token, else at the end of the row."""
        new = itertools.islice(enumerate(row), self.prompt_length, None)
        return next((position + 1 for position, token in new if token in self.eos), len(row))

    def kept(self, sequence: int, position: int) -> bool:
        """Whether a token is part of the text."""
        if position >= self.prompt_length:
            return position < self.ends[sequence]
        if self.mask is None:
            return True
        return bool(self.mask[sequence * len(self.mask) // len(self.ids)][position])


class TokenReader:
    """Collects steps by call while the run goes, and gives token rows once a call has ended."""

    def __init__(self, tokenizer: Any, run_id: str, rank: int = 0) -> None:
        self.use(tokenizer)
        self.run_id = run_id
        self.rank = rank
        self._steps: dict[int, StepLog] = {}
        self._texts: dict[int, str] = {}
        self._read: dict[int, CallTokens | None] = {}

    def use(self, tokenizer: Any) -> None:
        """Give the tokens their text by this tokenizer; None for none."""
        self.tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()) or ())

    def note(self, steps: list[Step], rows: dict[int, dict[str, Any]]) -> None:
        """Remember of each main step when it ended and how long the sequences were then."""
        columns = ("step", "phase", "batch", "q_len", "kv_len_before", "kv_len_after")
        for step in steps:
            if step.role == "main":
                row = rows[step.index]
                end_ns = row["start_ns"] + row["wall_ns"]
                known = {name: row[name] for name in columns}
                facts = StepFacts(end_ns=end_ns, length_after=step.length_after, **known)
                self._steps.setdefault(step.call.index, StepLog()).add(facts)

    def rows(self, call: Call) -> tuple[list[dict[str, Any]], dict[int, StepTokens]]:
        """Return the token rows of a call and the counts of its steps."""
        steps = sorted(self._steps.get(call.index, ()), key=lambda facts: facts.step)
        tokens = self._tokens(call)
        if tokens is None:
            return [], {s.step: StepTokens(None, _processed(s)) for s in steps}
        step_at = StepFinder(steps, tokens.prompt_length)
        rows = [
            self._row(call, tokens, sequence, position, step_at(position))
            for sequence, row in enumerate(tokens.ids)
            for position in range(len(row))
        ]
        given = Counter(row["step"] for row in rows if row["source"] == "generated" and row["kept"])
        return rows, {s.step: StepTokens(given[s.step], _real(s, tokens), _undone(s, tokens)) for s in steps}

    def call_facts(self, call: Call) -> dict[str, Any]:
        """Prompt tokens, new tokens, stop reason, first and last arrival, for the manifest."""
        tokens = self._tokens(call)
        steps = [s for s in self._steps.get(call.index, ()) if s.length_after is not None]
        if tokens is None:
            return dict.fromkeys(
                (
                    "sequences",
                    "prompt_tokens",
                    "new_tokens",
                    "stop_reason",
                    "stop_reasons",
                    "first_token_ns",
                    "last_token_ns",
                )
            )
        reasons = [self._reason(call, tokens, sequence) for sequence in range(len(tokens.ids))]
        new = [end - tokens.prompt_length for end in tokens.ends]
        longest = tokens.prompt_length + max(new, default=0)
        step_at = StepFinder(steps, tokens.prompt_length)
        last = step_at(longest - 1) if longest > tokens.prompt_length else None
        mask = tokens.mask
        return {
            "sequences": len(tokens.ids),
            "prompt_tokens": [sum(row) for row in mask] if mask is not None else [call.prompt_length] * len(tokens.ids),
            "new_tokens": new,
            "stop_reason": _stop_of_all(reasons),
            "stop_reasons": reasons,
            **_drafts(steps, tokens.prompt_length if call.prompt_length == tokens.prompt_length else None),
            "first_token_ns": steps[0].end_ns if steps else None,
            "last_token_ns": last.end_ns if last is not None else None,
        }

    def sequences(self, calls: list[Call]) -> list[Sequence]:
        """Each distinct sequence without padding, with the calls that gave it."""
        owners: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
        lengths: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for call in calls:
            tokens = self._tokens(call)
            for sequence, row in enumerate(tokens.ids if tokens is not None else ()):
                assert tokens is not None
                end = tokens.ends[sequence]
                first = next((p for p in range(end) if tokens.kept(sequence, p)), end)
                if tokens.prompt_length > first and end > tokens.prompt_length:
                    key = (sequence, first, tuple(row[first:end]))
                    owners.setdefault(key, []).append(call.index)
                    lengths[key] = tokens.prompt_length - first
        return [Sequence(tuple(calls_), key[0], key[1], lengths[key], key[2]) for key, calls_ in owners.items()]

    def texts(self, call: Call) -> tuple[list[str], list[str]]:
        """Prompt and new text of each sequence of a call, without special tokens."""
        tokens = self._tokens(call)
        if tokens is None:
            return [], []
        kept = [
            [(p, token) for p, token in enumerate(row) if tokens.kept(sequence, p)]
            for sequence, row in enumerate(tokens.ids)
        ]
        prompts = [[token for p, token in row if p < tokens.prompt_length] for row in kept]
        new = [[token for p, token in row if p >= tokens.prompt_length] for row in kept]
        decode = self.tokenizer.batch_decode
        return decode(prompts, skip_special_tokens=True), decode(new, skip_special_tokens=True)

    def _tokens(self, call: Call) -> CallTokens | None:
        """The call's ids, brought to the host once it has ended."""
        if call.index not in self._read:
            self._read[call.index] = _bring(call)
            call.output_ids = call.prompt_ids = call.prompt_mask = None
        return self._read[call.index]

    def _row(
        self, call: Call, tokens: CallTokens, sequence: int, position: int, step: StepFacts | None
    ) -> dict[str, Any]:
        token_id = tokens.ids[sequence][position]
        generated = position >= tokens.prompt_length
        return {
            "run_id": self.run_id,
            "rank": self.rank,
            "call": call.index,
            "step": step.step if step is not None else None,
            "sequence": sequence,
            "position": position,
            "token_id": token_id,
            "text": self._text(token_id),
            "source": "generated" if generated else "prompt",
            "is_special": token_id in self._special if self.tokenizer is not None else None,
            "kept": tokens.kept(sequence, position),
            "arrival_ns": step.end_ns if generated and step is not None else None,
        }

    def _text(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        if token_id not in self._texts:
            self._texts[token_id] = self.tokenizer.decode([token_id])
        return self._texts[token_id]

    def _reason(self, call: Call, tokens: CallTokens, sequence: int) -> str:
        row, end = tokens.ids[sequence], tokens.ends[sequence]
        if end > tokens.prompt_length and row[end - 1] in tokens.eos:
            return "eos"
        if call.max_length is not None and len(row) >= call.max_length:
            return "length"
        return f"criterion {' or '.join(call.criteria)}" if call.criteria else "unknown"


def _drafts(steps: list[StepFacts], prompt_length: int | None) -> dict[str, int | None]:
    """Tokens that were drafted and accepted; null for a call that does not draft.

    A step that verifies a draft processes more positions than there are tokens: those beyond are
    the draft, and what it gives beyond one token was accepted from it.
    """
    drafted = accepted = 0
    known = prompt_length
    for step in steps:
        if known is None or step.kv_len_after is None or step.length_after is None:
            return {"drafted": None, "accepted": None}
        drafted += max(step.kv_len_after - known, 0)
        accepted += max(step.length_after - known - 1, 0)
        known = step.length_after
    return {"drafted": drafted, "accepted": accepted} if drafted else {"drafted": None, "accepted": None}


def _stop_of_all(reasons: list[str]) -> str | None:
    """Why the call ended: what stopped the sequences that went on longest, so `eos` only if all ended so."""
    return next((reason for reason in reasons if reason != "eos"), reasons[0] if reasons else None)


def _bring(call: Call) -> CallTokens | None:
    if call.output_ids is None:
        return None
    prompt_length = call.prompt_ids.shape[-1] if call.prompt_ids is not None else 0
    eos = frozenset(torch.as_tensor(call.eos).flatten().tolist()) if call.eos is not None else frozenset()
    mask = call.prompt_mask.tolist() if call.prompt_mask is not None else None
    return CallTokens(call.output_ids.tolist(), prompt_length, mask, eos)


class StepFinder:
    """Finds the step that gave the token at a position, or, in the prompt, that processed it.

    What steps reach only grows from one to the next that reaches further, so a position is looked
    up in the reaches so far.
    """

    def __init__(self, steps: list[StepFacts], prompt_length: int) -> None:
        self.prompt_length = prompt_length
        self._given = _furthest((s.length_after, s) for s in steps)
        self._processed = _furthest((s.kv_len_after, s) for s in steps)

    def __call__(self, position: int) -> StepFacts | None:
        """The first step that reaches beyond the position; in the prompt one that did not begin behind it."""
        in_prompt = position < self.prompt_length
        reaches, steps = self._processed if in_prompt else self._given
        number = bisect.bisect_right(reaches, position)
        found = steps[number] if number < len(steps) else None
        return None if found is not None and in_prompt and (found.kv_len_before or 0) > position else found


def _furthest(reaches: Iterable[tuple[int | None, StepFacts]]) -> tuple[list[int], list[StepFacts]]:
    """The steps that reach further than all before them, by their reach."""
    found: tuple[list[int], list[StepFacts]] = ([], [])
    for reach, step in reaches:
        if reach is not None and (not found[0] or reach > found[0][-1]):
            found[0].append(reach)
            found[1].append(step)
    return found


def _undone(step: StepFacts, tokens: CallTokens) -> bool:
    """Whether a step chose a token that the result does not hold; beams are cut to the best for another reason."""
    longest = max((len(row) for row in tokens.ids), default=0)
    return step.length_after is not None and step.length_after > longest and step.batch == len(tokens.ids)


def _processed(step: StepFacts) -> int | None:
    return step.batch * step.q_len if step.batch is not None and step.q_len is not None else None


def _real(step: StepFacts, tokens: CallTokens) -> int | None:
    """Positions that a step processed less padding: before the prompt, and behind a sequence's end."""
    if step.batch is None or step.q_len is None or step.kv_len_after is None or not tokens.ids:
        return _processed(step)
    first = step.kv_len_after - step.q_len
    if step.batch % len(tokens.ids) or (step.batch != len(tokens.ids) and first >= tokens.prompt_length):
        return _processed(step)  # beams: the rows of the forward are not those of the result
    per_sequence = step.batch // len(tokens.ids)
    positions = range(first, step.kv_len_after)
    return per_sequence * sum(
        tokens.kept(sequence, position) for sequence in range(len(tokens.ids)) for position in positions
    )
