"""Paged keys and values: which shapes belong together, and what a wrong table meets."""

from __future__ import annotations

import numpy as np
import pytest

import dlattn as cudnn
from dlattn.plans.params import address_slot, params_for
from tests.unit.valid_graphs import FLOAT, HALF, row_major

INT32, INT64 = cudnn.data_type.INT32, cudnn.data_type.INT64
NotSupported = cudnn.cudnnGraphNotSupportedError
BATCH, HEADS, SEQ_Q, SEQ_KV, DIM = 2, 2, 3, 20, 8
PAGES = 9


class Paged:
    """A forward graph with pages of 8 keys and 16 values, whose parts a test may change."""

    def __init__(self, paged="kv", page=(8, 16), backward=False):
        self.graph = cudnn.pygraph(io_data_type=HALF, handle=cudnn.create_handle(device="cpu"))
        self.backward = backward
        self.tensors = {"q": self.tensor("q", (BATCH, HEADS, SEQ_Q, DIM))}
        for role, rows in zip("kv", page, strict=True):
            dim = (PAGES, HEADS, rows, DIM) if role in paged else (BATCH, HEADS, SEQ_KV, DIM)
            self.tensors[role] = self.tensor(role, dim)
        for role in ("seq_len_q", "seq_len_kv"):
            self.tensors[role] = self.tensor(role, (BATCH, 1, 1, 1), INT32)
        for role in paged:
            pages = -(-SEQ_KV // page["kv".index(role)])
            name = f"paged_attention_{role}_table"
            self.tensors[name] = self.tensor(name, (BATCH, 1, pages, 1), INT32)
        if backward:
            for role in ("o", "dO"):
                self.tensors[role] = self.tensor(role, (BATCH, HEADS, SEQ_Q, DIM))
            self.tensors["stats"] = self.tensor("stats", (BATCH, HEADS, SEQ_Q, 1), FLOAT)
        self.arguments = {"use_padding_mask": True}

    def tensor(self, name, dim, dtype=cudnn.data_type.NOT_SET):
        return self.graph.tensor(dim, row_major(dim), dtype, name=name)

    def validate(self, **arguments):
        given = {**self.tensors, **self.arguments, **arguments}
        if self.backward:
            self.made = self.graph.sdpa_backward(**given)
        else:
            self.made = self.graph.sdpa(**given, generate_stats=False)
        for t in self.made:
            if t is not None:
                t.set_output(True)
        self.graph.validate()
        return self

    def longest(self, **arguments):
        return self.validate(**arguments).graph.lowered.geometry.seq_kv


@pytest.mark.parametrize("paged", ["kv", "k", "v"])
@pytest.mark.parametrize("backward", [False, True])
def test_what_may_be_paged(paged, backward):
    """Keys, values or both, forward and backward, and gradients are containers like them."""
    made = Paged(paged, backward=backward).validate()
    problem = made.graph.lowered.problem
    assert (problem.paged_k, problem.paged_v) == ("k" in paged, "v" in paged)
    if backward:
        _, d_k, d_v = made.made
        for role, gradient in (("k", d_k), ("v", d_v)):
            assert gradient.get_dim() == made.tensors[role].get_dim()
            assert gradient.get_stride() == made.tensors[role].get_stride()


def test_the_longest_sequence_as_given():
    """It is what the argument says, where nothing else is known."""
    assert Paged().longest(paged_attention_max_seq_len_kv=19) == 19


@pytest.mark.parametrize("paged", ["k", "v"])
def test_the_longest_sequence_of_what_is_not_paged(paged):
    """It is the size of k, or of v, whichever is not paged; a number given must agree."""
    assert Paged(paged).longest() == SEQ_KV
    assert Paged(paged).longest(paged_attention_max_seq_len_kv=SEQ_KV) == SEQ_KV
    with pytest.raises(ValueError, match="=19, but ., which is not paged, has 20 rows"):
        Paged(paged).longest(paged_attention_max_seq_len_kv=19)


def test_the_longest_sequence_of_a_bias():
    """It is a bias' last size, unless that broadcasts."""
    made = Paged()
    assert made.longest(bias=made.tensor("bias", (1, 1, SEQ_Q, 18))) == 18
    made = Paged()
    assert made.longest(bias=made.tensor("bias", (1, 1, SEQ_Q, 1))) == 24


def test_the_longest_sequence_of_the_tables():
    """It is what both tables have pages for, when nothing else says it."""
    assert Paged().longest() == 24


def test_wider_tables():
    """A table may have more entries than the longest sequence needs, not fewer."""
    for pages in (3, 7):
        made = Paged("k")
        name = "paged_attention_k_table"
        made.tensors[name] = made.tensor(name, (BATCH, 1, pages, 1), INT32)
        made.validate()
    made = Paged("k")
    made.tensors[name] = made.tensor(name, (BATCH, 1, 2, 1), INT32)
    with pytest.raises(ValueError, match=r"has dim \(2, 1, 2, 1\); expected \(2, 1, 3, 1\)"):
        made.validate()


def test_lengths_are_optional():
    """Without one, every sequence is full."""
    for missing in ("seq_len_q", "seq_len_kv"):
        made = Paged()
        del made.tensors[missing]
        made.validate()


def test_lengths_of_ragged_queries():
    """Beside pages, those of the queries may follow from the offsets of a ragged q."""
    made = Paged()
    del made.tensors["seq_len_q"]
    made.tensors["q"].set_ragged_offset(made.tensor("offsets", (BATCH + 1, 1, 1, 1), INT32))
    problem = made.validate().graph.lowered.problem
    assert problem.ragged and problem.paged_k and problem.paged_v


@pytest.mark.parametrize("role", ["k", "v", "dK", "dV"])
def test_pages_are_not_ragged(role):
    """A tensor lies in pages or is ragged, not both; gradients of what is paged lie in pages."""
    made = Paged(role[-1].lower(), backward=True)
    offsets = made.tensor("offsets", (BATCH + 1, 1, 1, 1), INT32)
    if role in made.tensors:
        made.tensors[role].set_ragged_offset(offsets)
    results = made.graph.sdpa_backward(**made.tensors, **made.arguments)
    for gradient, t in zip(("dQ", "dK", "dV"), results, strict=True):
        t.set_output(True).set_name(gradient)
        if gradient == role:
            t.set_ragged_offset(offsets)
    said = f"{role} has a ragged offset, and lies in pages, because there is paged_attention_"
    with pytest.raises(ValueError, match=said):
        made.graph.validate()


def test_a_longest_sequence_without_pages():
    """The argument alone would do nothing, and is refused."""
    with pytest.raises(ValueError, match="max_seq_len_kv=20 without paged_attention_k_table"):
        Paged("").validate(paged_attention_max_seq_len_kv=20)


@pytest.mark.parametrize("given", [0, -1, 1.5, True])
def test_a_longest_sequence_that_is_none(given):
    """It is a whole number, at least 1."""
    with pytest.raises(RuntimeError, match="paged_attention_max_seq_len_kv must be"):
        Paged().validate(paged_attention_max_seq_len_kv=given)


def test_pages_are_powers_of_two():
    """Other pages are a valid wish that no plan grants."""
    with pytest.raises(NotSupported, match="k has pages of 12 rows"):
        Paged("k", page=(12, 16)).validate()


def test_tables_are_int32():
    """Entries of another type are refused."""
    made = Paged("k")
    name = "paged_attention_k_table"
    made.tensors[name] = made.tensor(name, (BATCH, 1, 3, 1), INT64)
    with pytest.raises(ValueError, match="k_table is data_type.INT64; expected INT32"):
        made.validate()


def test_packed_tables():
    """A table with offsets, one more than sequences, may be set before or after the operation."""
    made = Paged("k")
    offsets = made.tensor("offsets", (BATCH + 1, 1, 1, 1), INT64)
    made.tensors["paged_attention_k_table"].set_ragged_offset(offsets)
    lowered = made.validate().graph.lowered
    assert lowered.geometry.tensors["paged_attention_k_table"].packed
    assert lowered.tensors["paged_attention_k_table_offset"] is offsets
    made = Paged("k")
    offsets = made.tensor("offsets", (BATCH, 1, 1, 1), INT64)
    made.tensors["paged_attention_k_table"].set_ragged_offset(offsets)
    with pytest.raises(
        ValueError,
        match=r"offsets is a ragged .* dim \(2, 1, 1, 1\) .* dim \(3, 1, 1, 1\)",
    ):
        made.validate()


def run(table, lengths, backward=False):
    """Pages of 8 keys in a container of 9 pages of ones, one value head."""
    made = Paged("k", backward=backward).validate()
    made.graph.build()
    memory = {"k": np.ones((PAGES, HEADS, 8, DIM), np.float16)}
    for role in ("q", "v", "o", "dO"):
        rows = SEQ_KV if role == "v" else SEQ_Q
        memory[role] = np.ones((BATCH, HEADS, rows, DIM), np.float16)
    memory["stats"] = np.zeros((BATCH, HEADS, SEQ_Q, 1), np.float32)
    memory["seq_len_q"] = np.full((BATCH, 1, 1, 1), SEQ_Q, np.int32)
    memory["seq_len_kv"] = np.array(lengths, np.int32).reshape(BATCH, 1, 1, 1)
    memory["paged_attention_k_table"] = np.array(table, np.int32).reshape(BATCH, 1, 3, 1)
    results = [np.full(t.get_dim(), 7, np.float16) for t in made.made if t is not None]
    pack = {t: memory[role] for role, t in made.tensors.items()}
    outputs = (t for t in made.made if t is not None)
    made.graph.execute(pack | dict(zip(outputs, results, strict=True)))
    return results


def test_pages_that_there_are_not():
    """The reference engine refuses them within the lengths, and never looks past them."""
    run([0, 1, 99, 2, -5, 10**6], lengths=(16, 1))
    for wrong in (9, -1):
        with pytest.raises(ValueError, match="pages of sequence 1, of 9 rows, are .*from 0 to 8"):
            run([0, 1, 99, 2, wrong, 0], lengths=(16, 9))


def test_shared_pages():
    """Sequences may share pages in a forward; where they would get gradients, it is an error."""
    table = [3, 4, 99, 3, 5, 99]
    run(table, lengths=(16, 16))
    run(table, lengths=(16, 0), backward=True)
    with pytest.raises(ValueError, match="page 3 belongs to several sequences"):
        run(table, lengths=(16, 1), backward=True)


def test_pages_that_are_left_alone():
    """A backward writes whole pages that hold tokens, and no others."""
    _, d_k, _ = run([3, 4, 99, 8, 5, 99], lengths=(9, 1), backward=True)
    written = sorted({3, 4, 8})
    assert (d_k[[page for page in range(PAGES) if page not in written]] == 7).all()
    assert (d_k[written] != 7).all() and (d_k[4][:, 1:] == 0).all() and (d_k[8][:, 1:] == 0).all()


def test_a_call_with_packed_tables():
    """``Graph`` takes a packed table of any shape, and its offsets, like every other tensor."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((BATCH, HEADS, SEQ_Q, DIM))
    k, v = rng.standard_normal((2, PAGES, HEADS, 8, DIM))
    lengths = {"seq_len_q": (3, 2), "seq_len_kv": (9, 20)}
    lengths = {role: np.array(n, np.int32).reshape(BATCH, 1, 1, 1) for role, n in lengths.items()}
    entries = np.array([4, 2, 7, 0, 5], np.int32)
    offsets = np.array([0, 2, 5], np.int32).reshape(3, 1, 1, 1)
    with cudnn.Graph() as graph:
        packed = graph.tensor((BATCH, 1, 3, 1), data_type=INT32, name="table")
        packed.set_ragged_offset(graph.tensor_like(offsets, name="offsets"))
        o, _ = graph.sdpa(
            q, k, v, is_inference=True, use_padding_mask=True, name="sdpa", **lengths,
            paged_attention_k_table=packed, paged_attention_v_table=packed,
            paged_attention_max_seq_len_kv=20,
        )  # fmt: skip
        o.set_output(True)
    pack = {"sdpa::0": q, "sdpa::1": k, "sdpa::2": v, "table": entries, "offsets": offsets}
    result = graph({**pack, **{f"sdpa::{role}": length for role, length in lengths.items()}})
    for entry, pages in enumerate(([4, 2], [7, 0, 5])):
        rows, n = lengths["seq_len_q"].item(entry), lengths["seq_len_kv"].item(entry)
        keys, values = (x[pages].swapaxes(0, 1).reshape(HEADS, -1, DIM)[:, :n] for x in (k, v))
        weights = np.exp(q[entry, :, :rows] @ keys.swapaxes(1, 2))
        expected = weights @ values / weights.sum(-1, keepdims=True)
        assert np.allclose(result["sdpa::O"][entry, :, :rows], expected)


@pytest.mark.parametrize("wrong", [(0, 3, 6), (-1, 2, 5)])
def test_offsets_of_packed_tables_stay_inside(wrong):
    """In host memory, offsets that leave the table are refused."""
    made = Paged("k")
    table, offsets = "paged_attention_k_table", made.tensor("offsets", (BATCH + 1, 1, 1, 1), INT32)
    made.tensors[table].set_ragged_offset(offsets)
    made.validate().graph.build()
    memory = {t: np.zeros(t.get_dim(), np.float16) for t in made.graph.lowered.tensors.values()}
    for role in ("seq_len_q", "seq_len_kv"):
        memory[made.tensors[role]] = np.ones((BATCH, 1, 1, 1), np.int32)
    memory[made.tensors[table]] = np.zeros(5, np.int32)
    memory[offsets] = np.array((0, 2, 5), np.int32).reshape(-1, 1, 1, 1)
    made.graph.execute(memory)
    memory[offsets] = np.array(wrong, np.int32).reshape(-1, 1, 1, 1)
    with pytest.raises(ValueError, match="offsets: expected offsets from 0 to at most 5"):
        made.graph.execute(memory)
    memory[offsets] = np.array((0, 4, 5), np.int32).reshape(-1, 1, 1, 1)
    memory[made.tensors["seq_len_kv"]] = np.full((BATCH, 1, 1, 1), 9, np.int32)
    with pytest.raises(ValueError, match="sequence 1, of 9 rows in pages of 8, has entries 4 to 5"):
        made.graph.execute(memory)


def test_what_kernels_are_told():
    """Strides in entries, the size and number of pages, and where the addresses go."""
    made = Paged("v", page=(8, 16))
    offsets = made.tensor("offsets", (BATCH + 1, 1, 1, 1), INT64)
    made.tensors["paged_attention_v_table"].set_ragged_offset(offsets)
    geometry = made.validate().graph.lowered.geometry
    params = params_for(geometry)
    assert params.k_pages.pages == 0 and params.paged_rows == 32
    pages = params.v_pages
    assert (pages.page, pages.log2_rows, pages.pages, pages.has_int64_offsets) == (1, 4, PAGES, 1)
    address_slot(params, geometry, "paged_attention_v_table").value = 4096
    address_slot(params, geometry, "paged_attention_v_table_offset").value = 8192
    assert (params.v_pages.data, params.v_pages.offsets) == (4096, 8192)
