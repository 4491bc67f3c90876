"""Tests type strings, and the checks of values and functions against them."""

import concurrent.futures
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.devices import make_mesh
from shardlib import ops, types
from shardlib.errors import ShardTypeError, SpecError, UserError
from shardlib.types import Stacked, bf16, f32, pytree_dataclass, typechecked, typed_shard_map
from tests import golden

P = jax.sharding.PartitionSpec
MESH = {"d": 4, "t": 2}


# --- Parsing

WORDS = ["B", "M/t", "V/t/e", "[V/e]", "3", "{U:t}", "{U:d,e}", " ", " ", ",", "->", "/", "]", "{"]


@given(st.lists(st.sampled_from(WORDS)).map("".join) | st.text(max_size=12))
def test_any_string_parses_to_what_prints_as_it_or_is_refused_with_a_caret(text):
    for parse in types.parse_spec, types.parse_signature:
        try:
            parsed = parse(text)
        except SpecError as error:
            assert text in str(error)
        else:
            *operands, result = [parsed] if parse is types.parse_spec else parsed
            printed = ",".join(map(str, operands)) + "->" * bool(operands) + str(result)
            assert "".join(printed.split()) == "".join(text.split())


def test_what_a_spec_means():
    spec = types.parse_spec(" B/d  L [V/t/e] {U:x,y} ")
    assert spec.dims == (types.Dim("B", ("d",)), types.Dim("L"), types.Dim("V", ("t", "e"), True))
    assert spec.unreduced_axes == ("x", "y")
    assert types.parse_spec("") == types.Spec()
    assert types.parse_spec("M\n    N") == types.parse_spec("M N")
    assert str(types.parse_spec("s/r r/s")) == "s/r r/s", "these names are dimensions"
    assert types.parse_signature("{U:d}->") == (types.Spec((), ("d",)), types.Spec())


@pytest.mark.parametrize(
    "text",
    ["B/d L/d", "M {U:t,t}", "B//d", "[V/t", "V/t]", "B d/3", "2x", "B {U:}", "B {U:t", "B {V:t}",
     "{U:t} B", "B, L", "B -> L", "B/d-L", "é", "B {U:t}L"],
)  # fmt: skip
def test_bad_specs(text):
    with golden.raises("specs.txt", text, SpecError):
        types.parse_spec(text)


@pytest.mark.parametrize("text", ["B", "B -> L -> M", "B -> L, M"])
def test_bad_signatures(text):
    with golden.raises("specs.txt", f"signature {text}", SpecError):
        types.parse_signature(text)


# --- Values


def test_isinstance_checks_dtype_rank_and_sizes():
    x = np.zeros((2, 3), np.float32)
    assert isinstance(x, f32["A B"]) and isinstance(x, f32["2 B"])
    for other in f32["3 B"], f32["A A"], f32["A"], bf16["A B"]:
        assert not isinstance(x, other)
    assert not isinstance(None, f32["A B"])
    assert isinstance(np.zeros((3, 3), np.float32), f32["A A"])
    assert f32["B/d  L"] is f32["B/d L"]
    assert repr(f32["B/d  L"]) == 'f32["B/d L"]'


def test_a_failed_check_binds_nothing():
    with types.scope():
        assert not isinstance(None, f32["A B"])
        assert not isinstance(np.zeros((2, 3), np.float32), f32["A 4"])
        types.check(np.zeros((5, 7), np.float32), f32["A B"], "x")
        assert not isinstance(np.zeros((2, 7), np.float32), f32["A B"])
        assert isinstance(np.zeros((5, 7), np.float32), f32["A B"])


def test_a_concrete_array_must_have_its_layout():
    with jax.set_mesh(make_mesh(MESH)):
        x = jax.device_put(jnp.zeros((8, 8)), types.make_shardings(f32["M/d F/t"]))
        assert isinstance(x, f32["M/d F/t"])
        for other in f32["M/t F/d"], f32["M F"], f32["M/d F {U:t}"]:
            assert not isinstance(x, other)
        assert isinstance(jnp.zeros((8, 8)), f32["M F"])
        assert not isinstance(jnp.zeros((8, 8)), f32["M/d F"])
        assert jax.jit(lambda x: isinstance(x, f32["M/t F/d"]))(x), "a tracer has no layout yet"


def raises(fn, *args):
    with jax.set_mesh(make_mesh(MESH)), pytest.raises(ShardTypeError) as error:
        fn(*args)
    return str(error.value)


@pytree_dataclass
class Layer:
    w: f32["M/d F/t"]
    gain: f32["M/t/d"]


@pytree_dataclass
class Model:
    layers: Stacked["layers", Layer]
    embed: bf16["V/t M/d"]


def model(**changes):
    arrays = {"gain": np.zeros((3, 8), "f"), "embed": jnp.zeros((6, 8), jnp.bfloat16)} | changes
    layers = Layer(np.zeros((3, 8, 4), "f"), arrays["gain"])
    return Model(layers, jax.device_get(arrays["embed"]))


@typed_shard_map
def use(model: Model, x: f32["B/d M/t"]) -> f32["B/d M/t"]:
    return x


def owing(x: f32["B M {U:t}"]) -> f32["B M"]:
    return x


X = np.ones((4, 8), np.float32)


def returning(make, result):
    def fn(x: f32["B/d M/t"], w: f32["M/d F"]) -> result:
        return make(x, w)

    return lambda: jax.jit(typed_shard_map(fn))(X, np.ones((8, 6), np.float32))


WRONG_CALLS = {
    "argument: a dtype": lambda: use(model(embed=jnp.zeros((6, 8))), X),
    "argument: a rank": lambda: use(model(), X[0]),
    "argument: a size bound elsewhere": lambda: use(model(), np.ones((4, 16), np.float32)),
    "argument: an uneven split": lambda: use(model(embed=jnp.zeros((5, 8), jnp.bfloat16)), X),
    "argument: another tree": lambda: use(X, X),
    "argument: no array": lambda: use(model(gain=None), X),
    "argument: a sum owed": lambda: typed_shard_map(owing)(X),
    "result: another size": returning(lambda x, w: x[:, :2], f32["B/d M/t"]),
    "result: the wrong split": returning(lambda x, w: x, f32["B/t M/d"]),
    "result: a split not declared": returning(lambda x, w: x[:, 0], f32["B/d"]),
    "result: a declared sum": returning(
        lambda x, w: ops.reduce_sum("B/d M/t -> B/d {U:t}", x), f32["B/d {U:t}"]
    ),
    "result: an unreduced scalar": returning(lambda x, w: jnp.sum(x), f32[""]),
    "result: nothing": returning(lambda x, w: None, f32["B/d M/t"]),
    "result: too much": returning(lambda x, w: (x, x), f32["B/d M/t"]),
    "no result type": lambda: typed_shard_map(lambda x: x),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_arguments_and_results(case):
    golden.check("functions.txt", case, raises(WRONG_CALLS[case]))


def test_a_scalar_weight_may_pass_through_a_function():
    """ops.broadcast has made it varying, so that its gradient is summed."""

    @typechecked
    def both(x: f32["B/d M/t"], heat: f32[""]) -> tuple[f32["B/d M/t"], f32[""]]:
        return x, heat

    @typed_shard_map
    def scaled(x: f32["B/d M/t"], heat: f32[""]) -> f32["B/d M/t"]:
        x, heat = both(x, ops.broadcast(" -> ", heat))
        return x * heat

    with jax.set_mesh(make_mesh(MESH)):
        np.testing.assert_array_equal(jax.jit(scaled)(X, np.float32(2)), 2 * X)


def test_a_typechecked_function_has_sizes_of_its_own():
    @typechecked
    def double(x: f32["N N"], times: int = 2) -> f32["N N"]:
        assert isinstance(np.zeros(len(x), np.float32), f32["N"])
        assert not isinstance(np.zeros(len(x) + 1, np.float32), f32["N"])
        return x * times

    @typechecked
    def outer(x: f32["N"]) -> f32["N"]:
        double(np.zeros((5, 5), np.float32))
        double(np.zeros((7, 7), np.float32), times=3)
        return x

    outer(np.zeros(3, np.float32))
    golden.check("functions.txt", "typechecked: argument", raises(double, np.zeros((5, 6), "f")))

    @typechecked
    def shorter(x: f32["N"]) -> f32["N"]:
        return x[1:]

    golden.check("functions.txt", "typechecked: result", raises(shorter, np.zeros(4, "f")))
    with types.scope():
        assert isinstance(np.zeros(9, np.float32), f32["N"]), "a failed call left sizes behind"


def test_threads_have_sizes_of_their_own():
    with types.scope(), concurrent.futures.ThreadPoolExecutor() as threads:
        types.check(np.zeros(3, np.float32), f32["N"], "x")
        assert threads.submit(isinstance, np.zeros(4, np.float32), f32["N"]).result()


# --- Trees


def test_layouts_come_from_the_annotations():
    assert types.type_tree(Model).layers.w is f32["layers M/d F/t"]
    assert not types.has_arrays(int) and not types.has_arrays(tuple[Any, int])
    assert types.type_tree(tuple[()]) == ()
    with jax.set_mesh(make_mesh(MESH)):
        specs = types.make_partition_specs(Model)
        assert specs == Model(Layer(P(None, "d", "t"), P(None, ("t", "d"))), P("t", "d"))
        assert types.make_partition_specs(tuple[f32["M/d"], Layer])[0] == P("d")
        shapes = types.make_shapes(Model, {"layers": 3, "M": 8, "F": 4, "V": 6})
        assert shapes.layers.gain.shape == (3, 8)
        assert shapes.embed.dtype == jnp.bfloat16


@dataclasses.dataclass
class NoPytree:
    x: f32["N"]


@pytree_dataclass
class Mixed:
    x: f32["N"]
    count: int


UNCHECKABLE = {
    "a text or an array": f32["N"] | str,
    "a list": list[f32["N"]],
    "any number": tuple[f32["N"], ...],
    "arrays and others": tuple[f32["N"], int],
    "a dataclass of arrays and others": Mixed,
    "a dataclass that JAX does not know": NoPytree,
}


@pytest.mark.parametrize("case", UNCHECKABLE)
def test_an_annotation_that_could_not_be_checked_is_refused(case):
    def argument(x: UNCHECKABLE[case]): ...

    def result() -> UNCHECKABLE[case]: ...

    for fn in argument, result:
        with pytest.raises(SpecError, match="can't be checked"):
            typechecked(fn)


BAD_STACKED = {
    "two dimensions": lambda: Stacked["layers L", Layer],
    "a sum owed": lambda: Stacked["layers {U:d}", Layer],
    "an axis that the layer has": lambda: types.type_tree(Stacked["layers/d", Layer]),
    "an integer": lambda: f32[3],
}


@pytest.mark.parametrize("case", BAD_STACKED)
def test_bad_stacks(case):
    with golden.raises("specs.txt", f"stacked: {case}", SpecError):
        BAD_STACKED[case]()


def in_bf16(kind):
    dims = (types.Dim(dim.name) for dim in kind.spec.dims)
    return types.array_type(bf16, types.Spec(tuple(dims)))


def test_a_mapped_tree_has_the_types_that_its_function_makes():
    hint = types.Mapped[in_bf16, Stacked["layers", Layer]]
    declared = jax.tree.leaves(types.type_tree(Stacked["layers", Layer]))
    actual = jax.tree.leaves(types.type_tree(hint))
    assert actual == [in_bf16(kind) for kind in declared] and actual != declared


@pytree_dataclass
class Narrow:
    gain: f32["M"]


@pytree_dataclass
class Chosen:
    layer: Layer | Narrow | None
    scale: f32[""] | f32["M"]
    other: f32["M"] | None


def test_a_value_says_which_alternative_there_is():
    narrow = Narrow(np.zeros(3, "f"))
    for layer, tree in (narrow, Narrow(f32["M"])), (None, None):
        value = Chosen(layer, np.zeros(3, "f"), None)
        assert types.type_tree(Chosen, value) == Chosen(tree, f32["M"], None)
    assert types.type_tree(Chosen, Chosen(None, np.float32(1), narrow.gain)).scale is f32[""]
    chosen = types.choose(Chosen, layer=Narrow, scale=True, other=None)
    assert chosen == Chosen(Narrow(f32["M"]), f32[""], None)
    declared = types.choose(Chosen, layer=True, scale=f32["M"], other=True)
    assert declared == Chosen(types.type_tree(Layer), f32["M"], f32["M"])
    # Types derived from others, of which the value has those derived.
    stacked = types.type_tree(Stacked["layers", Chosen], chosen)
    assert stacked == Chosen(Narrow(f32["layers M"]), f32["layers"], None)
    assert types.type_tree(Stacked["layers", types.Subset[Narrow]], Narrow(None)) == Narrow(None)


def test_a_value_that_is_none_of_the_alternatives():
    @typechecked
    def fn(x: Chosen) -> None: ...

    fn(Chosen(None, jnp.float32(1), None))
    with pytest.raises(ShardTypeError, match="argument `x` of fn is not of type Chosen"):
        fn(Chosen(3, jnp.float32(1), None))
    with pytest.raises(ShardTypeError, match=r"`x` of fn\.scale .*\n.*\n.*\n.* has 2 dimension"):
        fn(Chosen(None, jnp.zeros((2, 2)), None))
    with pytest.raises(SpecError, match=r"choose one with types\.choose"):
        types.type_tree(Chosen)


def test_a_dict_holds_arrays_of_one_type_or_of_several():
    @typechecked
    def fn(x: dict[str, f32[""] | f32["M"]]) -> dict[str, f32["M"]]:
        return {"y": x["b"]}

    one, row = jnp.float32(1), jnp.zeros(3)
    assert fn({"a": one, "b": row})["y"] is row
    with pytest.raises(ShardTypeError, match="argument `x`"):
        fn({"a": jnp.zeros((2, 2))})
    with pytest.raises(ShardTypeError, match=r"`x` of fn\['a'\] (.*\n)+.*int32, not f32: cast it"):
        fn({"a": jnp.int32(1)})
    with pytest.raises(ShardTypeError, match="result of fn"):
        fn({"b": one})

    @typed_shard_map
    def mapped(x: f32["M/d"]) -> dict[str, f32[""]]:
        return {"sum": ops.psum("{U:d} -> ", ops.reduce_sum("M/d -> {U:d}", x))}

    @typed_shard_map
    def not_reduced(x: f32["M/d"]) -> dict[str, f32["N"]]:
        return {"part": x}

    with jax.set_mesh(make_mesh(MESH)):
        assert mapped(np.ones(8, "f")) == {"sum": 8}
        with pytest.raises(ShardTypeError, match="varies along d"):
            not_reduced(np.ones(8, "f"))


def test_any_in_a_tuple_is_not_checked_and_what_stands_beside_it_is():
    @typechecked
    def fn(x: tuple[f32["M"], Any], kept: Any) -> tuple[Any, f32["M"]]:
        return kept, x[0]

    one = jnp.zeros(3)
    for kept in (), None, {"a": one}, "text":
        assert fn((one, kept), kept)[0] is kept
    with pytest.raises(ShardTypeError, match="argument `x` of fn"):
        fn((jnp.zeros((3, 3)), None), None)

    @typed_shard_map
    def mapped(x: tuple[f32["M"], Any]) -> f32["M"]:
        return x[0]

    with jax.set_mesh(make_mesh(MESH)), pytest.raises(SpecError, match="Any has no layout"):
        mapped((one, one))


def test_shapes_and_layouts_need_sizes_and_axes():
    with jax.set_mesh(make_mesh(MESH)):
        assert types.make_shapes(f32["8/t M"], {"M": 4}).shape == (8, 4)
        for spec, sizes in (("M", {}), ("M/q", {"M": 4}), ("M/d/t", {"M": 8})):
            kind = SpecError if sizes else UserError
            with golden.raises("specs.txt", f"shape of {spec}", kind):
                types.make_shapes(f32[spec], sizes)
        with pytest.raises(UserError, match="dimension 3=3 does not split evenly"):
            types.make_shapes(f32["3/t"], {}, {"M": "model.d_model"})


def test_a_mesh_is_needed():
    message = r"jax.set_mesh\(mesh\)"
    with pytest.raises(ShardTypeError, match=message):
        use(model(), X)
    explicit = jax.make_mesh((4, 2), ("d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit), pytest.raises(ShardTypeError, match=message):
        use(model(), X)
