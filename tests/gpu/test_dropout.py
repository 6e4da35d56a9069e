"""Dropout on a GPU: each engine applies the twin's mask, bit for bit, whatever its tiles are."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from tests.drivers import gpu_library

pytestmark = pytest.mark.gpu

#: Keys, which have one probability if q = 0, and with one-hot values a column of o each.
KEYS = 200


def numpy(x):
    return x.cpu().numpy() if gpu_library().is_torch else x.get()


def device(x):
    library = gpu_library()
    if library.is_torch:
        return library.xp.tensor(x, device=library.device)
    return library.xp.asarray(x)


def graph_of(engine, monkeypatch):
    monkeypatch.setenv("DLATTN_ENGINE", engine)
    types = cudnn.data_type
    return cudnn.pygraph(
        io_data_type=types.HALF,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
    )


@pytest.mark.parametrize("engine", ["sm80", "sm90"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("queries", [64, 333])
@pytest.mark.parametrize("algorithm", ["philox", "flash"])
def test_engines_apply_the_twins_mask(engine, head_dim, queries, algorithm, monkeypatch):
    """o of one-hot values, and dV of one-hot gradients, show which probabilities were kept: those
    of the twin, in forward and backward, and so does each pass's dump."""
    batch, heads, p, seed, offset = (
        2,
        3,
        0.3,
        -(2**50) - 7,
        2**33 - 70,
    )  # carries within the first pairs
    shape = (batch, heads, queries, KEYS)
    mask = cudnn.philox_dropout_mask(p, seed, offset, shape, algorithm)
    zeros = np.zeros((batch, heads, queries, head_dim), np.float16)
    shown = min(head_dim, KEYS)
    v = np.zeros((batch, heads, KEYS, head_dim), np.float16)
    v[:, :, np.arange(shown), np.arange(shown)] = 1
    k = np.zeros_like(v)
    d_o = np.zeros_like(zeros)
    rows = min(head_dim, queries)
    d_o[:, :, np.arange(rows), np.arange(rows)] = 1
    stats = np.full((batch, heads, queries, 1), np.log(KEYS), np.float32)

    def run(inputs, outputs, call):
        graph = graph_of(engine, monkeypatch)
        given = {role: device(x) for role, x in inputs.items()}
        random = [device(np.full((1,) * 4, x)) for x in (seed, offset)]
        dump = device(np.full(shape, np.nan, np.float32))
        tensors = {role: graph.tensor_like(x) for role, x in given.items()}
        drawn = [graph.tensor_like(x) for x in random]
        t_dump = graph.tensor_like(dump)
        made = getattr(graph, call)(
            **tensors,
            dropout=(p, *drawn),
            dropout_algorithm=algorithm,
            rng_dump=t_dump,
            **({"is_inference": True} if call == "sdpa" else {}),
        )
        results = [device(np.full(like.shape, np.nan, np.float16)) for like in outputs]
        pack = {t: given[role] for role, t in tensors.items()}
        pack |= {t_dump: dump, **dict(zip(drawn, random, strict=True))}
        for t, x in zip(made, results, strict=False):
            t.set_output(True).set_dim(x.shape)
            pack[t] = x
        graph.build()
        library = gpu_library()
        graph.execute(pack, library.full(graph.get_workspace_size() + 1, 0, "uint8"))
        assert (numpy(dump) == mask).all()
        return [numpy(x) for x in results]

    try:
        o = run({"q": zeros, "k": k, "v": v}, (zeros,), "sdpa")[0]
    except cudnn.cudnnGraphNotSupportedError as refused:
        pytest.skip(str(refused))
    kept = mask[..., :shown] / (KEYS * (1 - p))
    assert (abs(o[..., :shown] - kept) < 2e-3 / KEYS).all()
    inputs = {"q": zeros, "k": k, "v": v, "o": o, "dO": d_o, "stats": stats}
    d_v = run(inputs, (zeros, k, v), "sdpa_backward")[2]
    kept = mask.swapaxes(2, 3)[..., :rows] / (KEYS * (1 - p))
    assert (abs(d_v[..., :rows] - kept) < 2e-3 / KEYS).all()
