"""Graphs to be serialised, and what they compute."""

from __future__ import annotations

import numpy as np

import dlattn as cudnn

HALF = cudnn.data_type.HALF
DIM = (2, 4, 8, 16)
UIDS = {"q": 10, "k": 11, "v": 12, "o": 20, "stats": 21}


def declared(dim=DIM, **options):
    """A forward graph whose tensors have uids."""
    graph = cudnn.pygraph("mine", io_data_type=HALF, **options)
    tensors = [graph.tensor(dim, name=role, uid=UIDS[role]) for role in "qkv"]
    outputs = graph.sdpa(*tensors, attn_scale=0.25, generate_stats=True, use_causal_mask=True)
    for role, t in zip(("o", "stats"), outputs, strict=True):
        t.set_output(True).set_uid(UIDS[role])
    return graph


def on_cpu(**options):
    graph = declared(handle=cudnn.create_handle(device="cpu"), **options)
    graph.build()
    return graph


def restored(*arguments, **options):
    graph = cudnn.pygraph(**options)
    graph.deserialize(*arguments)
    return graph


def results(graph, dim=DIM, **arguments):
    """What a graph gives, by uid, of fixed inputs."""
    rng = np.random.default_rng(0)
    pack = {UIDS[role]: rng.standard_normal(dim).astype(np.float16) for role in "qkv"}
    pack[UIDS["o"]] = np.zeros(dim, np.float16)
    pack[UIDS["stats"]] = np.zeros((*dim[:3], 1), np.float32)
    graph.execute(pack, None, **arguments)
    return pack[UIDS["o"]], pack[UIDS["stats"]]


def same(first, second):
    return all(map(np.array_equal, first, second))
