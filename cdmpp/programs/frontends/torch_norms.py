"""Normalisations of torch programs: imported as they are meant, and folded. TVM on first use.

TVM 0.27 takes the momentum of an undecomposed ``batch_norm`` for its epsilon and its mode for training, and
stops at a ``layer_norm`` without weights.
"""

from __future__ import annotations

from typing import Any


def _batch_norm(node: Any, importer: Any) -> Any:
    from tvm import relax

    data, *pieces = (importer.env.get(argument) for argument in node.args[:5])
    training, momentum, epsilon = node.args[5:8]
    channels, dtype = int(data.ty.shape[1]), str(data.ty.dtype)
    fill = ("ones", "zeros", "zeros", "ones")  # scale, shift, mean, variance
    filled = [
        getattr(relax.op, how)((channels,), dtype) if piece is None else piece
        for piece, how in zip(pieces, fill, strict=True)
    ]
    result = importer.block_builder.emit(
        relax.op.nn.batch_norm(data, *filled, axis=1, epsilon=epsilon, momentum=momentum, training=training)
    )
    return importer.block_builder.emit(result[0])


def _layer_norm(node: Any, importer: Any) -> Any:
    # Weight, bias and epsilon may be left out from the end.
    data, shape, scale, shift, epsilon = (*node.args, *(None, None, 1e-5)[len(node.args) - 2 :])[:5]
    env = importer.env
    pieces = (None if piece is None else env[piece] for piece in (scale, shift))
    return importer._layer_norm_impl(env[data], *pieces, epsilon, shape)


#: Operator -> how to import it, in place of TVM's own way.
CONVERTERS = {"batch_norm.default": _batch_norm, "layer_norm.default": _layer_norm}


def fold_batch_norm(function: Any) -> Any:
    """Batch normalisation becomes a factor and a bias, the factor part of the weight behind a convolution.

    Every compiler for inference does it; TVM's own pass wants the weights as constants. Both depend on
    weights alone, so that they are computed before the model runs.
    """
    from tvm import relax
    from tvm.relax import dpl

    data, weight = dpl.wildcard(), dpl.wildcard()
    before = (
        (dpl.is_op("relax.nn.conv2d")(data, weight), "OIHW"),
        (dpl.is_op("relax.nn.conv2d_transpose")(data, weight), "IOHW"),
        (dpl.wildcard(), ""),
    )
    for product, layout in before:
        statistics = [dpl.wildcard() for _ in range(4)]
        norm = dpl.is_op("relax.nn.batch_norm")(product, *statistics)

        def rewrite(
            expression: Any,
            matches: Any,
            product: Any = product,
            norm: Any = norm,
            layout: str = layout,
            statistics: Any = statistics,
        ) -> Any:
            values = [matches[pattern] for pattern in statistics]
            pair = (matches[data], matches[weight]) if layout else None
            return _folded(relax, layout, matches[product], pair, values, matches[norm].attrs, expression)

        function = dpl.rewrite_call(dpl.TupleGetItemPattern(norm, 0), rewrite, function)
    return function


def _folded(relax: Any, layout: str, product: Any, pair: Any, statistics: Any, attributes: Any, expression: Any) -> Any:
    """Replacement of a normalisation of ``product``; with a layout that is a convolution of ``pair``."""
    op, (scale, shift, mean, variance) = relax.op, statistics
    channels = shift.ty.shape[0]
    epsilon = relax.const(float(attributes["epsilon"]), str(variance.ty.dtype))
    factor = op.divide(scale, op.sqrt(op.add(variance, epsilon)))
    bias = op.subtract(shift, op.multiply(mean, factor))
    rank = len(product.ty.shape)
    if attributes["training"]:  # TVM would lower it as if it were not
        raise ValueError("batch_norm in training mode is not supported: export module.eval()")
    if attributes["axis"] != 1:
        return expression
    along = (1, channels, *[1] * (rank - 2))
    if not layout:
        return op.add(op.multiply(product, op.reshape(factor, along)), op.reshape(bias, along))
    data, weight = pair
    if product.attrs["kernel_layout"] != layout or (layout == "IOHW" and product.attrs["groups"] != 1):
        return expression
    spread = (1, channels, 1, 1) if layout == "IOHW" else (channels, 1, 1, 1)
    folded = op.multiply(weight, op.reshape(factor, spread))
    return op.add(relax.Call(product.op, (data, folded), product.attrs), op.reshape(bias, along))
