"""The growing entries of a state: keys, values, latents. A copy lies beside the emitted files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from archir.sequence import Rows


def places(seq: Rows, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Row, absolute position and flat index of every token that a row owns, in order."""
    key = ("places", device)
    if key not in seq.memo:
        row = [r for r, (a, b, _) in enumerate(seq) for _ in range(b - a)]
        position = [past + i for a, b, past in seq for i in range(b - a)]
        token = [i for a, b, _ in seq for i in range(a, b)]
        made = torch.tensor([row, position, token], dtype=torch.int64, device=device)
        seq.memo[key] = tuple(made.unbind(0))
    return seq.memo[key]


class Storage:
    """Memory [R, room, …] that several caches may read.

    filled: how far each row was ever written; zeros lie beyond. `writable` unless gradients were on
    when it was made: then a graph may need its content.
    """

    __slots__ = ("filled", "prune_at", "readers", "tensor", "writable")

    def __init__(self, tensor: Tensor, filled: tuple[int, ...], writable: bool = True) -> None:
        self.tensor, self.filled, self.writable = tensor, filled, writable
        self.readers: list[ref[Cache]] = []
        self.prune_at = 8

    def add(self, cache: Cache) -> None:
        """Remembers a reader for as long as it lives."""
        if len(self.readers) >= self.prune_at:
            self.readers = [r for r in self.readers if r() is not None]
            self.prune_at = max(8, 2 * len(self.readers))
        self.readers.append(ref(cache))

    def may_write(self, cache: Cache) -> bool:
        """Whether writing behind `cache` reaches nothing that another living cache needs."""
        if not self.writable:
            return False
        if self.tensor.is_inference() and not torch.is_inference_mode_enabled():
            return False
        if self.filled == cache.lengths:
            return True
        others = (other for r in self.readers if (other := r()) is not None and other is not cache)
        return not any(
            theirs > mine
            for other in others
            for theirs, mine in zip(other.lengths, cache.lengths, strict=True)
        )


class Cache:
    """A growing tensor [R, P, …]: row r holds `lengths[r]` entries, in storage that doubles.

    `append` returns a new handle. It writes in place, so that appending rarely copies; where
    another living handle needs what lies there (a snapshot of a longer past), or gradients are on,
    it writes into a copy. `moves` and `copied` count such copies of the past, and their bytes.
    `reserve` is how many entries are known to come: the first growth makes room for them.
    """

    __slots__ = (
        "__weakref__", "copied", "length", "lengths", "moves", "reserve", "store",
    )  # fmt: skip

    def __init__(
        self,
        store: Storage,
        lengths: tuple[int, ...],
        moves: int = 0,
        copied: int = 0,
        reserve: int = 16,
    ) -> None:
        self.store, self.lengths, self.length = store, lengths, max(lengths, default=0)
        self.moves, self.copied, self.reserve = moves, copied, reserve
        store.add(self)

    @staticmethod
    def of(values: Tensor, lengths: tuple[int, ...], reserve: int = 16) -> Cache:
        """A cache of `values` [R, P, …], which are zero beyond a row's length; it takes them."""
        return Cache(Storage(values, lengths, not torch.is_grad_enabled()), lengths, 0, 0, reserve)

    @property
    def storage(self) -> Tensor:
        """All memory, [R, room, …]."""
        return self.store.tensor

    @property
    def rows(self) -> Tensor:
        """[R, length, …]: a view. Behind a shorter row lie zeros, or what was cut from it."""
        return self.store.tensor[:, : self.length]

    @property
    def values(self) -> Tensor:
        """[R, length, …] with zeros behind a shorter row; a view where nothing was cut."""
        if self.store.filled == self.lengths:
            return self.rows
        return self._valid(self.rows)

    def append(self, x: Tensor, seq: Rows) -> Cache:
        """A handle in which each row's tokens of `x` [B, T, …] follow its past."""
        if "lengths" not in seq.memo:
            seq.memo["lengths"] = seq.lengths
        after: tuple[int, ...] = seq.memo["lengths"]
        need = max(after, default=0)
        store, moves, copied = self.store, self.moves, self.copied
        if torch.is_grad_enabled():
            store = Storage(self._joined(x, seq, need), after, writable=False)
            moves, copied = self._counted()
            return Cache(store, after, moves, copied, self.reserve)
        room = store.tensor.shape[1]
        if need > room or not store.may_write(self):
            grown = max(need, room if need <= room else 2 * room, self.reserve)
            # the first entries get what they need, so that a prompt's work stands beside no slack
            store = self._moved(x, grown if self.length else need)
            moves, copied = self._counted()
        if store.filled != self.lengths:
            for row, (end, filled) in enumerate(zip(after, store.filled, strict=True)):
                store.tensor[row, end:filled] = 0
        if seq.uniform and after:
            store.tensor[:, need - seq.length : need] = x
        elif seq.longest > 1 and not x.is_cuda:  # a copy per row, many times faster than by index
            flat = x.flatten(0, 1)
            for row, (start, stop, past) in enumerate(seq):
                store.tensor[row, past : past + stop - start] = flat[start:stop]
        else:
            row, position, token = places(seq, x.device)
            store.tensor[row, position] = x.flatten(0, 1)[token]
        store.filled = after
        return Cache(store, after, moves, copied, self.reserve)

    def _counted(self) -> tuple[int, int]:
        """`moves` and `copied` after one more copy of the past."""
        if not self.length:
            return self.moves, self.copied
        return self.moves + 1, self.copied + self.rows.nbytes

    def _moved(self, x: Tensor, room: int) -> Storage:
        """The entries in new storage; zeros, as what a mask hides is multiplied by 0."""
        made = x.new_zeros(len(self.lengths), room, *x.shape[2:])
        made[:, : self.length] = self.values
        return Storage(made, self.lengths)

    def _joined(self, x: Tensor, seq: Rows, need: int) -> Tensor:
        """Old and new entries in a new tensor, through which gradients flow."""
        if seq.uniform and len(seq):
            return torch.cat([self.storage[:, : need - seq.length], x], 1)
        room = x.new_zeros(len(seq), need - self.length, *x.shape[2:])
        row, position, token = places(seq, x.device)
        joined = torch.cat([self.values, room], 1)
        return joined.index_put((row, position), x.flatten(0, 1)[token])

    def _valid(self, x: Tensor) -> Tensor:
        """[R, P, …] with zeros beyond each row's length."""
        if min(self.lengths, default=0) == x.shape[1]:
            return x
        ends = torch.tensor(self.lengths, device=x.device)[:, None]
        beyond = torch.arange(x.shape[1], device=x.device) >= ends
        return x.masked_fill(beyond[(...,) + (None,) * (x.ndim - 2)], 0)

    # ---- what a state does with its rows

    @staticmethod
    def adopt(other: Any) -> Cache:
        """A handle of this class on the entries of another one's, of which this file has a copy."""
        return Cache(other.store, other.lengths, other.moves, other.copied, other.reserve)

    def share(self) -> Cache:
        """A second handle on the same entries; whoever writes where the other reads, copies."""
        return Cache(self.store, self.lengths, self.moves, self.copied, self.reserve)

    def cut(self, lengths: tuple[int, ...]) -> Cache:
        """The first `lengths[r]` entries of each row, in the same storage."""
        return Cache(self.store, lengths, self.moves, self.copied, self.reserve)

    def clone(self) -> Cache:
        """The same entries in storage of its own."""
        made = Cache.of(self.values.clone(), self.lengths, self.reserve)
        made.moves, made.copied = self._counted()
        return made

    def select(self, rows: Sequence[int]) -> Cache:
        """The entries of some rows, in storage of their own."""
        lengths = tuple(self.lengths[r] for r in rows)
        index = torch.tensor(rows, dtype=torch.int64, device=self.storage.device)
        found = self.values[:, : max(lengths, default=0)]
        return Cache.of(found.index_select(0, index), lengths, self.reserve)

    @staticmethod
    def concat(caches: Sequence[Cache]) -> Cache:
        """The rows of all caches one after another, in storage of their own."""
        lengths = tuple(n for cache in caches for n in cache.lengths)
        longest = max(lengths, default=0)
        parts = []
        for cache in caches:
            x = cache.values
            room = x.new_zeros(x.shape[0], longest - x.shape[1], *x.shape[2:])
            parts.append(torch.cat([x, room], 1))
        reserve = max(cache.reserve for cache in caches)
        return Cache.of(torch.cat(parts), lengths, reserve)
