"""How a weight is drawn from its init: on the host, from (seed, name) alone (D18)."""

from __future__ import annotations

import hashlib

import numpy as np

from archir.ir import Init


def draw(name: str, seed: int, init: Init, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor in float32 from (seed, name): whatever the device, rank or order (D18)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    rng = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    match init.kind, init.args:
        case "normal", (std,):
            return rng.standard_normal(shape, np.float32) * np.float32(std)
        case "uniform", (low, high):
            return rng.random(shape, np.float32) * np.float32(high - low) + np.float32(low)
        case "log_uniform", (low, high):
            return np.log(rng.uniform(low, high, shape)).astype(np.float32)
        case "inverse_softplus", (low, high):
            step = np.exp(rng.uniform(np.log(low), np.log(high), shape))
            return (step + np.log(-np.expm1(-step))).astype(np.float32)
        case "constant", (value,):
            return np.full(shape, value, np.float32)
        case "zeros", ():
            return np.zeros(shape, np.float32)
        case "ones", ():
            return np.ones(shape, np.float32)
    raise ValueError(f"unknown init {init}")
