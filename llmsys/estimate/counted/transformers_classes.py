"""Count a config.json as transformers' class has it, where that class differs from the model llmsys
builds from it.

Marian keeps its sinusoids as two tables of parameters that are never trained. XLNet maps 2 s
distances for each sequence on its own, where one row for each of the 2 s - 1 that exist is enough,
and the segments only on request.
"""

from llmsys.config.run import RunConfig
from llmsys.estimate.flops import count_flops
from llmsys.estimate.json_output import ConventionFlops, EstimateOutput, StepFlops


def match_transformers_class(result: EstimateOutput, config: RunConfig) -> EstimateOutput:
    """Return an estimate with the parameters and operations of transformers' class.

    Args:
        result: what `estimate_run` returned for a config.json.
        config: the config of the run.

    Returns:
        The same; `parameters.frozen` is added for Marian, and `full` and `hardware`
        operations differ for XLNet.
    """
    model = config.model
    if model.family == "encoder_decoder" and model.position.kind == "sinusoidal":
        tables = 2 * model.max_position_embeddings * model.hidden_size
        counts = result.parameters
        parts = counts.by_component | {
            "positions": counts.by_component.get("positions", 0) + tables
        }
        more = {"total": counts.total + tables, "frozen": tables, "by_component": parts}
        return result.model_copy(update={"parameters": counts.model_copy(update=more)})
    if model.position.kind == "transformer_xl" and model.head.kind == "permutation":
        return result.model_copy(update={"flops": _match_xlnet(result.flops, config)})
    return result


def _match_xlnet(flops: StepFlops, config: RunConfig) -> StepFlops:
    model, length = config.model, config.batch.sequence_length
    assert model.position.kind == "transformer_xl", "the caller has looked"
    sequences, width = config.batch.sequences_per_step, model.num_attention_heads * model.head_dim
    tokens, layers = sequences * length, model.num_hidden_layers
    matrix = 2 * layers * model.hidden_size * width
    # One distance more for every query, and no products with segments, which only token_type_ids
    # ask for.
    scores = 2 * layers * width * tokens * (1 - model.position.segments)
    more = matrix * (2 * tokens - (2 * length - 1)) + scores
    # Sinusoids have no gradient.
    spared = matrix * 2 * tokens
    # of one stream: XLNet's second needs target_mapping
    count = count_flops(model, length, sequences, "full")
    forward, attention = count.forward + more, count.attention + scores
    conventions = dict(flops.conventions)
    repeated = conventions["hardware"].forward_backward - conventions["full"].forward_backward
    for name, again in (("full", 0), ("hardware", repeated)):
        both = 3 * forward - spared + again
        conventions[name] = ConventionFlops(
            forward=forward,
            forward_backward=both,
            forward_backward_per_token=both / tokens,
            attention_share=attention / forward,
        )
    shown = dict(conventions[flops.convention])
    return flops.model_copy(update={"conventions": conventions, **shown})
