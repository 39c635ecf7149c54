"""Names of the parameters that a row of the estimate stands for."""

from llmsys.config.module_tensors import ParameterTensor


def list_parameter_names(row: ParameterTensor) -> list[str]:
    """The full name of every copy of a tensor."""
    return [row.name.replace("{i}", str(layer)) for layer in row.layers] or [row.name]
