"""List the primitives that compute each element from the same element of their operands."""

ELEMENTWISE = frozenset(
    [
        "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
        "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
        "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv",
        "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac",
        "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic",
        "lt", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter", "not",
        "one_minus_square", "or", "polygamma", "population_count", "pow", "real",
        "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
        "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh",
        "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "xor", "zeta",
    ]
)  # fmt: skip
"""The primitives that compute each element of their results from the same element of operands."""
