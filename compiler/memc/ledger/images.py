"""Operations of towers that see images: pixels, patches, windows of them, and features put among a text's tokens."""

from __future__ import annotations

from memc.ledger.attention_kernels import efficient_kernel, flash_kernel
from memc.ledger.machine import Gradients, Machine, Tensor
from memc.ledger.operations import cast, fitted, operation, unary
from memc.ledger.products import Weight, batched

_INDEX = 8


@operation
def pixels(machine: Machine, count: int) -> Tensor:
    """Returns the images of the batch, `count` fp32 elements for each position."""
    return machine.outside(machine.names["unit"], count, 4, "pixels")


@operation
def convolved(machine: Machine, x: Tensor, weight: Weight) -> Tensor:
    """Returns `x`, a product with `weight` that is a convolution in truth: it keeps the weight's copy too.

    Source: derivatives.yaml convolution: input and weight are kept whatever needs a gradient.
    """
    if weight.trained and weight in machine.cache:
        machine.save(x.node, machine.cache[weight])
    return machine.keep(x)


@operation
def with_class_token(machine: Machine, x: Tensor) -> Tensor:
    """Returns patches behind a learned row, in the wider type of both; the gradient of patches is a view, or a cast.

    Source: derivatives.yaml cat; autocast's list of operations that promote to the widest type.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        return [fitted(machine, machine.keep(gradient), unit, width, item)]

    node = machine.track([x], [], backward)
    out = machine.new(unit, width, max(item, machine.names["weight"]), "patches behind a class token", last=last)
    machine.produce(node, out)
    return out


@operation
def learned_positions(machine: Machine, x: Tensor) -> Tensor:
    """Returns the rows of a table of positions in the type of the table, one for each, the same for all images."""
    return machine.new(x.unit.partition("*")[2], x.width, machine.names["weight"], "positions", last=x.last)


@operation
def embedded(machine: Machine, x: Tensor) -> Tensor:
    """Returns what an embedding gives: adapters with checkpointing make it need a gradient.

    Source: transformers modeling_utils.py enable_input_require_grads.
    """
    if x.node is not None or not machine.names["reached"]:
        return machine.keep(x)
    out = machine.view(x)
    machine.produce(machine.leaf(None, _end, sequence=0), out)
    return out


def _end(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
    """Takes the gradient of a leaf, which keeps it until the step ends."""
    for gradient in gradients:
        if gradient is not None:
            machine.keep(gradient)
    return []


@operation
def reordered(machine: Machine, x: Tensor) -> Tensor:
    """Returns the rows of `x` in another order, which is kept; backward adds into zeros.

    Source: derivatives.yaml index.Tensor, FunctionsManual.cpp index_backward.
    """
    order = machine.new(x.unit, 1, _INDEX, "order of rows")
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of rows in their order", last=last)]

    node = machine.track([x], [order], backward)
    out = machine.like(x, "rows in another order")
    machine.produce(node, out)
    machine.release(order)
    return out


@operation
def merged_patches(machine: Machine, x: Tensor, count: int) -> Tensor:
    """Returns `x` viewed with the patches of a square, `count` of them, as one row."""
    unit, before = x.unit, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        out = machine.view(gradient)
        out.unit, out.width, out.last = unit, before, before
        return [out]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.unit, out.width, out.last = unit.replace("P", "M"), x.width * count, x.last * count
    machine.produce(node, out)
    return out


@operation
def last_rows(machine: Machine, x: Tensor, count: int) -> Tensor:
    """Returns the last `count` rows of every image as a view; backward writes a full gradient around them.

    Source: derivatives.yaml slice, slice_backward.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of rows", last=last)]

    node = machine.track([x], [], backward)
    out = machine.view(x)
    out.unit = f"{unit.partition('*')[0]}*{count}"
    machine.produce(node, out)
    return out


@operation
def pooled(machine: Machine, x: Tensor, count: int) -> Tensor:
    """Returns the means of squares of an image's positions, `count` of them; keeps its input.

    Source: derivatives.yaml avg_pool2d.
    """
    unit, width, item, last = x.unit, x.width, x.item, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        return [machine.new(unit, width, item, "gradient of pooled", last=last)]

    node = machine.track([x], [x], backward)
    out = machine.new(f"{unit.partition('*')[0]}*{count}", width, item, "pooled", last=last)
    machine.produce(node, out)
    return out


@operation
def shuffled_pixels(machine: Machine, x: Tensor, count: int) -> Tensor:
    """Returns squares of `count` patches as rows, by two permutations, each of which is copied, in backward too.

    Source: transformers modeling_llama4.py pixel_shuffle; derivatives.yaml view (a reshape of a permuted gradient).
    """
    kind, _, positions = x.unit.partition("*")
    unit, width, item, last = x.unit, x.width, x.item, x.last
    rows = f"{kind}*{int(positions) // count}"

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        first = machine.new(rows, width * count, item, "gradient of shuffled pixels")
        out = machine.new(unit, width, item, "gradient of shuffled pixels", last=last)
        machine.release(first)
        return [out]

    node = machine.track([x], [], backward)
    first = machine.new(unit, width, x.item, "shuffled pixels")
    out = machine.new(rows, width * count, x.item, "shuffled pixels", last=width * count)
    machine.produce(node, out)
    machine.release(first)
    return out


@operation
def thirds(machine: Machine, x: Tensor) -> tuple[Tensor, ...]:
    """Returns three views of `x` that lie beside each other in each row, by a permutation and `unbind`.

    Backward stacks their gradients, and copies the stack into the order of rows.
    Source: derivatives.yaml unbind (stack), permute, view (a reshape).
    """
    unit, width, last = x.unit, x.width, x.last

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        present = [gradient for gradient in gradients if gradient is not None]
        item = present[0].item
        zeros = [machine.new(unit, width // 3, item, "zeros") for _ in range(3 - len(present))]
        stacked = machine.new(unit, width, item, "gradients stacked", last=last)
        machine.release(*zeros)
        out = machine.new(unit, width, item, "gradient by rows", last=last)
        machine.release(stacked)
        return [out]

    node = machine.track([x], [], backward)
    parts = []
    for _ in range(3):
        part = machine.view(x)
        part.width, part.last = width // 3, last // 3
        parts.append(part)
    machine.produce(node, *parts)
    return tuple(parts)


@operation
def chunks(machine: Machine, x: Tensor, windows: int) -> tuple[Tensor, ...]:
    """Returns all chunks of rows of `x` but one, and that one, as views; backward joins their gradients.

    A chunk is a window of an image (the largest stands for all) or a whole image. Source: derivatives.yaml split.
    """
    unit, width, last, item = x.unit, x.width, x.last, x.item

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        out = machine.new(unit, width, item, "gradients of chunks, joined", last=last)
        out.transposed = out.head_major = True
        return [out]

    node = machine.track([x], [], backward)
    parts = []
    for rows in ("CR", "C") if windows else ("PR", "P"):
        part = machine.view(x)
        part.unit = rows
        parts.append(part)
    machine.produce(node, *parts)
    return tuple(parts)


@operation
def joined(machine: Machine, x: Tensor) -> Tensor:
    """Returns a copy of what is joined to be one tensor; gradients are views. Source: derivatives.yaml cat."""
    return unary(machine, x, "joined", passes=True)


@operation
def joined_chunks(machine: Machine, rest: Tensor, one: Tensor) -> Tensor:
    """Returns chunks joined along their rows: a copy; gradients are views. Source: derivatives.yaml cat."""
    shapes = [(part.unit, part.node is not None) for part in (rest, one)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        results: list[Tensor | None] = []
        for unit, wanted in shapes:
            view = machine.view(gradient) if wanted else None
            if view is not None:
                view.unit = unit
            results.append(view)
        return results

    node = machine.track([rest, one], [], backward)
    out = machine.new(machine.names["unit"], one.width, one.item, "joined", last=one.last)
    machine.produce(node, out)
    return out


@operation
def chunk_attention(machine: Machine, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention within chunks of rows, tokens first. A kernel runs for each chunk, with buffers of that size.

    Of several chunks, materialised scores leave only what backward needs: what passes is that of the one chunk that is
    looked at by itself.
    Source: transformers 5.24.0 models/qwen2_5_vl/modeling_qwen2_5_vl.py Qwen2_5_VLVisionAttention.forward.
    """
    names, chunk = machine.names, query.unit[0]
    if names["eager"]:
        return _kept_scores(machine, query, key, value) if query.unit != chunk else _scores(machine, query, key, value)
    kernel = efficient_kernel if names["efficient"] else flash_kernel
    found: Tensor = kernel(machine, query, key, value, *((0,) if names["efficient"] else ()), chunk)
    return found


def _scores(machine: Machine, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention in one chunk, whose scores exist: one number for each head and pair of rows."""
    item = machine.names["compute"] if machine.names["autocast"] else query.item
    q, k, v = (cast(machine, tensor, item) for tensor in (query, key, value))
    pairs = f"{query.unit}*{query.unit}"
    product = batched(machine, q, k, pairs, query.width // query.last, last=0)
    scaled = unary(machine, product, "scaled scores")
    machine.release(product, q, k)
    wide = cast(machine, scaled, 4)
    machine.release(scaled)
    probabilities = machine.call("softmax", [wide])
    machine.release(wide)
    weights = cast(machine, probabilities, query.item)
    machine.release(probabilities)
    given = cast(machine, weights, item)
    machine.release(weights)
    out = batched(machine, given, v, query.unit, value.width, last=value.last)
    machine.release(given, v)
    by_rows: Tensor = machine.call("merge_heads", [out])
    machine.release(out)
    return by_rows


def _kept_scores(machine: Machine, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns attention in several chunks: fp32 probabilities and their copy in the compute type are kept."""
    item = machine.names["compute"] if machine.names["autocast"] else query.item
    given = tuple([cast(machine, tensor, item) for tensor in (query, key, value)])
    pairs, heads = f"{query.unit[0]}Q", query.width // query.last
    shapes = [(tensor.unit, tensor.width, tensor.item, tensor.last, tensor.node is not None) for tensor in given]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        results: list[Tensor | None] = []
        for unit, width, item, last, wanted in shapes:
            made = machine.new(unit, width, item, "gradient of product", last=last) if wanted else None
            if made is not None:
                made.transposed = made.head_major = True
            results.append(made)
        return results

    node = machine.track(given, given, backward)
    kept = [
        machine.new(pairs, heads, 4, "probabilities"),
        machine.new(pairs, heads, machine.names["compute"], "attention weights"),
    ]
    machine.save(node, *kept)
    out = machine.new(query.unit, query.width, item, "attention output", last=query.last)
    out.transposed = True
    machine.produce(node, out)
    machine.release(*kept, *given)
    by_rows: Tensor = machine.call("merge_heads", [out])
    machine.release(out)
    return by_rows


@operation
def put_among_tokens(machine: Machine, x: Tensor, features: Tensor) -> Tensor:
    """Returns embedded tokens with features of images in their places; keeps which places those are.

    The kernel numbers all elements of the mask. Backward picks the gradients of features by the indices of their
    elements, one for each of three dimensions.
    Source: aten/src/ATen/native/cuda/IndexKernel.cpp masked_scatter__cuda, masked_select_out_cuda; derivatives.yaml
        masked_scatter; FunctionsManual.cpp masked_scatter_backward.
    """
    shape = (features.unit, features.width, features.item)
    x_node, features_node = x.node, features.node

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        of_x = machine.like(gradient, "gradient of tokens") if x_node is not None else None
        of_features = None
        if features_node is not None:
            picked = machine.new(shape[0], shape[1], gradient.item, "gradient of features", last=shape[1])
            of_features = fitted(machine, picked, *shape)
        return [of_x, of_features]

    node = machine.track([x, features], [], backward)
    places = machine.new(x.unit, 1, 1, "places of images")
    machine.save(node, places)
    out = machine.like(x, "tokens with images")
    machine.produce(node, out)
    machine.release(places)
    return out


@operation
def resampled_positions(machine: Machine, x: Tensor) -> Tensor:
    """Returns learned positions resampled to an image's grid: four rows of a table for each patch, weighted and summed.

    They pass in the type of the table; the product with the weights keeps the rows when the table trains.
    Source: transformers 5.24.0 models/qwen3_vl/modeling_qwen3_vl.py Qwen3VLVisionModel.forward.
    """
    item = machine.names["weight"]
    rows = machine.new(x.unit, 4 * x.width, item, "rows of the position table")
    weighted = machine.new(x.unit, 4 * x.width, item, "weighted positions")
    summed = machine.new(x.unit, x.width, item, "positions")
    machine.release(rows, weighted)
    found: Tensor = cast(machine, summed, x.item)
    machine.release(summed)
    return found


@operation
def with_deep_features(machine: Machine, x: Tensor, *features: Tensor) -> Tensor:
    """Returns `x`; features of lower layers, which the text reads beside it, have gradients of their own."""
    edges = [part.node is not None for part in (x, *features)]
    shapes = [(part.unit, part.width, part.item) for part in (x, *features)]

    def backward(machine: Machine, gradients: Gradients) -> list[Tensor | None]:
        (gradient,) = gradients
        assert gradient is not None
        own = machine.keep(gradient) if edges[0] else None
        others = [
            machine.new(*shape, "gradient of features") if wanted else None
            for wanted, shape in zip(edges[1:], shapes[1:], strict=True)
        ]
        return [own, *others]

    node = machine.track([x, *features], [], backward)
    out = machine.view(x)
    machine.produce(node, out)
    return out
