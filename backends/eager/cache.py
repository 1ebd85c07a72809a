"""The growing entries of a state: keys, values, latents. A copy lies beside the emitted files."""

from __future__ import annotations

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


class Cache:
    """A growing tensor [R, P, …] in storage that doubles, so that appending rarely copies.

    `append` writes in place and returns a new handle on the same storage; with gradients it is
    functional. `moves` and `copied` count reallocations and the bytes they copied. `reserve` is
    how many entries are known to come: the first growth makes room for them.
    """

    __slots__ = ("copied", "length", "moves", "reserve", "storage")

    def __init__(
        self, storage: Tensor, length: int, moves: int = 0, copied: int = 0, reserve: int = 16
    ) -> None:
        self.storage, self.length, self.moves, self.copied = storage, length, moves, copied
        self.reserve = reserve

    @property
    def rows(self) -> Tensor:
        """What has been appended, [R, length, …]; a view."""
        return self.storage[:, : self.length]

    def append(self, x: Tensor, seq: Rows) -> Cache:
        """A handle in which each row's tokens of `x` [B, T, …] follow its past."""
        need = max(seq.lengths, default=0)
        if torch.is_grad_enabled() and (x.requires_grad or self.storage.requires_grad):
            made = self._joined(x, seq, need)
            return Cache(made, need, self.moves, self.copied, self.reserve)
        storage, moves, copied = self.storage, self.moves, self.copied
        if need > storage.shape[1]:
            # the first entries get what they need, so that a prompt's work stands beside no slack
            room = max(need, 2 * storage.shape[1], self.reserve) if self.length else need
            # zeros: what a mask hides is multiplied by 0, and must not be NaN
            storage = x.new_zeros(len(seq), room, *x.shape[2:])
            storage[:, : self.length] = self.rows
            if self.length:
                moves, copied = moves + 1, copied + self.rows.nbytes
        if seq.uniform:
            storage[:, need - seq.length : need] = x
        else:
            row, position, token = places(seq, x.device)
            storage[row, position] = x.flatten(0, 1)[token]
        return Cache(storage, need, moves, copied, self.reserve)

    def _joined(self, x: Tensor, seq: Rows, need: int) -> Tensor:
        """Old and new entries in a new tensor, through which gradients flow."""
        if seq.uniform:
            return torch.cat([self.storage[:, : need - seq.length], x], 1)
        old = self.storage[:, :need]
        room = x.new_zeros(len(seq), need - old.shape[1], *x.shape[2:])
        row, position, token = places(seq, x.device)
        joined = torch.cat([old, room], 1)
        return joined.index_put((row, position), x.flatten(0, 1)[token])

    def clone(self) -> Cache:
        """The same entries in storage of its own."""
        return Cache(self.rows.clone(), self.length, self.moves, self.copied, self.reserve)
