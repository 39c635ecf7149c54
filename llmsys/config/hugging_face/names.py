"""Keys of a config.json that never change what a model computes, in any family, whatever their value.

Each is here because somebody looked it up; a key that is not here and not understood is refused.
"""

_FILE = """
    _name_or_path name_or_path _commit_hash transformers_version dtype torch_dtype torchscript use_bfloat16 auto_map
    model_type tokenizer_class architectures keys_to_ignore_at_inference unsloth_fixed unsloth_version
    custom_pipelines transformers.js_config
"""
# How transformers runs a model: kernels, memory, what is given back beside the result.
_RUN = """
    use_cache gradient_checkpointing chunk_size_feed_forward return_dict use_return_dict output_attentions
    output_hidden_states output_past output_scores
    output_router_logits tie_last_hidden_states cache_implementation attn_implementation
    _attn_implementation _attn_implementation_internal _attn_implementation_autoset _experts_implementation
    _experts_implementation_internal experts_implementation _flash_attn_2_enabled use_flash_attention_2 tf_legacy_loss
"""
# Token ids have a meaning for text, not for the network; where one does, its family reads it.
_IDS = """
    pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id force_bos_token_to_be_generated prefix
"""
# Labels and heads of fine-tuning; the classification head reads its own.
_TASKS = """
    id2label label2id num_labels _num_labels problem_type finetuning_task task_specific_params classifier_dropout
    classif_dropout summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels summary_type
    summary_use_proj
"""
_GENERATION = """
    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens target_lookbehind temperature
    top_k top_p typical_p
"""

HARMLESS = frozenset(" ".join((_FILE, _RUN, _IDS, _TASKS, _GENERATION)).split())
