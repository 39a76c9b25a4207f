"""Options of SGLang that are not refused, by field of ``ServerArgs``; ``server_flags`` has those that are."""

from __future__ import annotations

WORKS: dict[str, str] = {
    "tests/servers/test_server_identity.py::test_lossless_tier_gives_stock_tokens": "chunked_prefill_size",
    "tests/servers/test_server_page_size.py::test_lossless_gives_stock_tokens": "page_size",
    "tests/servers/test_server_pressure.py::test_small_pool_completes_all_with_the_same_tokens": (
        "max_total_tokens schedule_conservativeness disable_radix_cache decode_log_interval"
    ),
    "tests/servers/test_server_ranks.py::test_ranks_decide_alike_in_a_small_pool": "tp_size disable_overlap_schedule",
    "tests/servers/test_server_ranks.py::test_two_hosts_give_the_tokens_of_one_s_two_ranks_and_decide_alike": (
        "nnodes node_rank dist_init_addr"
    ),
    "tests/servers/test_server_replicas.py::test_each_replica_has_a_prefix_cache_of_its_own": "dp_size",
    "tests/servers/test_server_namespaces.py::test_the_policy_decides_what_is_evicted": "enable_priority_scheduling",
    "tests/tree/test_tree_eviction.py::test_every_eviction_policy_chooses_by_its_rule": (
        "radix_eviction_policy radix_eviction_policy_config _radix_eviction_policy_explicitly_set"
    ),
    "tests/servers/test_server_queue_order.py::test_what_a_session_left_stays_until_it_is_closed": (
        "enable_session_radix_cache"
    ),
    "tests/servers/test_server_queue_order.py::test_what_host_memory_has_goes_first_and_is_told_of": "schedule_policy",
    "tests/servers/test_server_hybrids.py::test_a_full_pool_retracts_and_loses_no_state": (
        "max_mamba_cache_size mamba_full_memory_ratio"
    ),
    "tests/servers/test_server_requests.py::test_structured_output": "grammar_backend",
    "tests/servers/test_server_options.py::test_adapters_share_no_prefix": (
        "enable_lora lora_paths max_lora_rank lora_target_modules lora_backend max_loras_per_batch max_loaded_loras"
    ),
    "tests/servers/test_server_options.py::test_the_canary_stays_silent": "kv_canary_sweep_interval",
    "tests/servers/test_server_options.py::test_events_tell_what_the_prefix_cache_holds": "kv_events_config",
    "tests/servers/test_server_options.py::test_thoughts_do_not_join_the_prefix_cache": (
        "strip_thinking_cache reasoning_parser"
    ),
    "tests/servers/test_server_options.py::test_a_request_of_higher_priority_takes_the_room": (
        "disable_priority_preemption priority_scheduling_preemption_threshold schedule_low_priority_values_first "
        "default_priority_value abort_on_priority_when_disabled"
    ),
    "tests/servers/test_server_options.py::test_hidden_states_and_logit_processors": (
        "enable_return_hidden_states return_hidden_states_mode enable_custom_logit_processor"
    ),
    "tests/servers/test_server_disaggregation.py::test_two_servers_give_the_tokens_of_one": (
        "disaggregation_mode disaggregation_transfer_backend disaggregation_bootstrap_port num_reserved_decode_tokens"
    ),
    "tests/servers/test_server_disaggregation.py::test_turns_of_chats_send_what_is_new": (
        "disaggregation_decode_enable_radix_cache"
    ),
    "tests/servers/test_refusals.py::test_what_two_servers_cannot_do_is_refused": (
        "disaggregation_decode_host_receive_threshold disaggregation_decode_allocation_policy "
        "disaggregation_decode_retraction_backup disaggregation_enable_kv_checksum optimistic_prefill_attempts"
    ),
    "tests/servers/test_server_identity.py::test_drafts_of_a_model_give_stock_tokens": "speculative_draft_model_path",
    "tests/servers/test_server_identity.py::test_trees_of_drafts_give_stock_tokens": (
        "speculative_ngram_min_bfs_breadth speculative_ngram_max_bfs_breadth"
    ),
    "tests/servers/test_server_identity.py::test_trees_of_a_model_give_stock_tokens": "speculative_eagle_topk",
}
"""Test -> fields that it sets, or that have their default in it."""

ORTHOGONAL: dict[str, str] = {
    "the order and the number of requests that are let in; each is admitted by its pages": (
        "disaggregation_decode_extra_slots disaggregation_decode_polling_interval "
        "max_running_requests max_queued_requests max_prefill_tokens prefill_max_requests "
        "prefill_decode_interval prefill_decode_interval_min_bs min_free_slots_delay enable_prefill_delayer "
        "prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_queue_min_ratio "
        "prefill_delayer_max_delay_ms lora_drain_wait_threshold scheduler_recv_interval num_continuous_decode_steps "
        "sleep_on_idle"
    ),
    "SGLang chooses whom to retract; any row can leave": "retraction_policy",
    "bytes that SGLang gives the pool; sizing is by all that the plugin puts on the device": "mem_fraction_static",
    "the model's size and type are read when the pool is planned; what does not fit is refused by model": (
        "model_path context_length dtype json_model_override_args model_impl model_config_parser "
        "quantization_param_path"
    ),
    "how a request finds its replica": "load_balance_method",
    "a draft model's own cache, a pool of SGLang's; bytes of FP8 are planned for, other dtypes as the model's": (
        "speculative_draft_kv_cache_dtype"
    ),
    "states of layers that do not attend, and what computes them, are SGLang's; their bytes are not the pool's": (
        "mamba_backend mamba_ssm_dtype enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
        "linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend "
        "linear_replayssm_cache_len enable_scattered_sconv"
    ),
    "decode steps are one graph for each batch size, as SGLang captures them; seen on H200s": (
        "disable_cuda_graph disable_decode_cuda_graph disable_prefill_cuda_graph cuda_graph_max_bs_decode "
        "cuda_graph_bs_decode disable_cuda_graph_padding enable_cudagraph_gc enable_profile_cuda_graph"
    ),
    "graphs of passes over prompts hold what is between attention, for the numbers of tokens that are chosen": (
        "cuda_graph_max_bs_prefill cuda_graph_bs_prefill cuda_graph_max_seq_len_prefill"
    ),
    "adapters change projections; their prefixes are apart by extra_key": (
        "enable_lora_overlap_loading lora_eviction_policy max_lora_chunk_size experts_shared_outer_loras "
        "lora_use_virtual_experts lora_strict_loading"
    ),
    "the rotary kernel gives K and V to the backend (the fused write to slots is declined)": (
        "enable_fused_qk_norm_rope"
    ),
    "load reports read sizes, which starts no exchange between ranks": (
        "load_snapshot_publish_interval load_publish_endpoint enable_metrics enable_metrics_for_all_schedulers"
    ),
}
"""Why they work -> fields that touch admission, sizes or scheduling and that no test sets."""

NO_BEARING: dict[str, str] = {
    "SGLang's own prefix cache of states, in place of which the plugin's keeps them": (
        "uses_mamba_radix_cache mamba_track_interval"
    ),
    "SGLang's pools for sliding windows, which the plugin switches off": (
        "swa_full_tokens_ratio _swa_full_tokens_ratio_explicitly_set disable_hybrid_swa_memory swa_prefix_tails "
        "enable_encoder_swa_bounded_replay enable_decoder_swa_bounded_replay"
    ),
    "HTTP, gRPC, ports and processes": (
        "host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads grpc_response_timeout_secs "
        "sidecar sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams "
        "http2_initial_connection_window_size ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password "
        "enable_ssl_refresh api_key admin_api_key served_model_name enable_http_worker_reuseport "
        "smg_http_sidecar_port nccl_port dist_timeout gated_launch_port base_gpu_id gpu_id_step "
        "numa_node gc_threshold watchdog_timeout soft_watchdog_timeout custom_sigquit_handler file_storage_path "
        "enable_response_store tokenizer_worker_num detokenizer_worker_num batch_notify_size random_seed"
    ),
    "templates, tokens and the form of requests and replies": (
        "chat_template trust_request_chat_template hf_chat_template_name completion_template enable_cache_report "
        "return_input_ids return_output_ids default_chat_template_kwargs enable_strict_thinking tool_call_parser "
        "tool_server sampling_defaults asr_max_buffer_seconds asr_max_concurrent_sessions preferred_sampling_params "
        "allow_auto_truncate stream_interval stream_response_default_include_usage incremental_streaming_output "
        "tokenizer_path tokenizer_mode tokenizer_backend skip_tokenizer_init enable_dynamic_batch_tokenizer "
        "dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode "
        "disable_tokenizer_batch_decode"
    ),
    "sampling from logits": (
        "sampling_backend sampling_mask_max_tokens constrained_json_whitespace_pattern "
        "constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt disable_outlines_disk_cache "
        "mlx_enable_sampling enable_watermark watermark_config watermark_key watermark_key_b watermark_context_window "
        "watermark_mixing_probability watermark_max_probability watermark_default_enabled watermark_enforce_all"
    ),
    "logs, traces, metrics and dumps": (
        "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target "
        "show_time_cost uvicorn_access_log_exclude_prefixes crash_dump_folder enable_mfu_metrics "
        "tokenizer_metrics_custom_labels_header tokenizer_metrics_allowed_custom_labels extra_metric_labels "
        "bucket_time_to_first_token bucket_inter_token_latency bucket_e2e_request_latency prompt_tokens_buckets "
        "generation_tokens_buckets gc_warning_threshold_secs enable_request_time_stats_logging "
        "enable_forward_pass_metrics forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace "
        "trace_modules otlp_traces_endpoint otlp_service_name export_metrics_to_file export_metrics_to_file_dir "
        "stat_loggers enable_layerwise_nvtx_marker debug_tensor_dump_output_folder debug_tensor_dump_layers "
        "debug_tensor_dump_input_file forward_hooks msprobe_dump_config prefill_delayer_forward_passes_buckets "
        "prefill_delayer_wait_seconds_buckets"
    ),
    "how weights are found, loaded and kept": (
        "load_format model_loader_extra_config trust_remote_code revision download_dir model_checksum "
        "delete_ckpt_after_loading decrypted_config_file decrypted_draft_config_file custom_weight_loader "
        "weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads "
        "weight_loader_drop_cache_after_load startup_weight_load_mode checkpoint_engine_wait_weights_before_ready "
        "weight_version weight_cache_mode weight_cache_socket weight_cache_timeout "
        "remote_instance_weight_loader_seed_instance_ip remote_instance_weight_loader_seed_instance_service_port "
        "remote_instance_weight_loader_send_weights_group_ports remote_instance_weight_loader_backend "
        "remote_instance_weight_loader_start_seed_via_transfer_engine engine_info_bootstrap_port modelexpress_config "
        "cpu_offload_gb offload_group_size offload_num_in_group offload_prefetch_step offload_mode kt_weight_path "
        "kt_method kt_cpuinfer kt_threadpool_count kt_num_gpu_experts kt_max_deferred_experts_per_token "
        "ple_offload_embedding ple_offload_backend ple_offload_dir"
    ),
    "how weights are quantised and multiplied": (
        "quantization modelopt_quant modelopt_checkpoint_restore_path modelopt_checkpoint_save_path "
        "modelopt_export_path quantize_and_serve rl_quant_profile torchao_config enable_fp32_lm_head "
        "enable_tf32_matmul fp8_gemm_runner_backend fp4_gemm_runner_backend bf16_gemm_backend "
        "disable_flashinfer_autotune flashinfer_autotune_skip_ops"
    ),
    "experts": (
        "ep_size moe_dp_size moe_dense_tp_size moe_a2a_backend moe_runner_backend enable_w4a4_mxfp4_megamoe "
        "deepep_v2_mode flashinfer_a2a_dispatch_type flashinfer_mxfp4_moe_precision deepep_mode deepep_config "
        "deepep_dispatcher_output_dtype fuseep_mode ep_num_redundant_experts ep_dispatch_algorithm "
        "init_expert_location enable_eplb eplb_algorithm eplb_rebalance_num_iterations "
        "eplb_rebalance_layers_per_chunk eplb_min_rebalancing_utilization_threshold expert_distribution_recorder_mode "
        "expert_distribution_recorder_buffer_size expert_balancedness_report_mode enable_expert_distribution_metrics "
        "mooncake_ib_device enable_waterfill disable_flashinfer_cutlass_moe_fp4_allgather "
        "disable_shared_experts_fusion enforce_shared_experts_fusion enable_shared_experts_attn_tp "
        "shared_experts_tp_size enable_fused_moe_sum_all_reduce enable_single_batch_overlap enable_paged_experts "
        "paged_experts_num_resident enable_megamoe_for_layernorm_sp"
    ),
    "communication of activations between ranks": (
        "disaggregation_ib_device "
        "enable_p2p_check enable_nccl_nvls enable_symm_mem disable_custom_all_reduce enable_mscclpp "
        "enable_torch_symm_mem pre_warm_nccl boundary_reduction enable_quant_communications "
        "enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion "
        "flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion disable_aiter_allreduce_fusion_in_prefill "
        "disable_aiter_allreduce_fusion_in_decode enable_layernorm_sp enable_dense_mlp_attn_tp disable_attn_tp_gather "
        "enable_attn_tp_input_scattered enable_tp_lm_head_all_to_all"
    ),
    "images, video and sound, which are embeddings before the first layer": (
        "enable_multimodal mm_attention_backend enable_precise_embedding_interpolation "
        "enable_broadcast_mm_inputs_process enable_prefix_mm_cache mm_enable_dp_encoder mm_process_config "
        "mm_processor_worker_num mm_io_worker_num allowed_media_domains media_url_max_file_size_mb "
        "mm_preprocess_cache_size_mb trust_mm_content_hashes limit_mm_data_per_request enable_mm_global_cache "
        "mm_global_cache_backend image_processor_backend disable_fast_image_processor mm_feature_transport "
        "keep_mm_feature_on_device language_only language_model_only encoder_transfer_backend encoder_urls "
        "encoder_bootstrap_port encoder_register_urls enable_adaptive_dispatch_to_encoder"
    ),
    "which tokens NGRAM proposes": (
        "speculative_ngram_match_type speculative_ngram_max_trie_depth speculative_ngram_capacity"
    ),
    "which tokens a draft model proposes, which of them are accepted, and its weights": (
        "speculative_draft_model_revision speculative_draft_load_format speculative_draft_model_quantization "
        "_speculative_draft_quantization_explicitly_set enable_draft_weights_cpu_backup speculative_token_map "
        "speculative_draft_window_size speculative_draft_sink_size speculative_moe_runner_backend "
        "speculative_moe_a2a_backend speculative_enable_w4a4_mxfp4_megamoe speculative_boundary_reduction "
        "speculative_accept_threshold_single speculative_accept_threshold_acc speculative_use_rejection_sampling "
        "speculative_use_block_verification spec_trace_dir"
    ),
    "attention kernels of other backends": (
        "speculative_attention_mode "
        "enable_lean_attention triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
        "triton_attention_split_tile_size prefill_kv_cache_dequant_dtype"
    ),
}
"""What the options are about -> fields."""

ONLY_WITH: dict[str, str] = {
    "speculative_algorithm": (
        "speculative_dflash_block_size speculative_dspark_block_size speculative_dspark_sps_table_path "
        "speculative_dspark_confidence_sts_path speculative_dspark_align_verify_tokens_to_graph_tier "
        "speculative_domino_candidate_pool_size"
    ),
    "speculative_adaptive": "speculative_adaptive_config",
    "decoupled_spec_role": ("decoupled_spec_bind_endpoint decoupled_spec_connect_endpoints decoupled_spec_rank"),
    "enable_return_aux_hidden_states": "aux_hidden_state_capture return_aux_hidden_state_layer_ids",
    "speculative_ngram_external_sam_budget": (
        "speculative_ngram_external_corpus_path speculative_ngram_external_corpus_max_tokens"
    ),
    "enable_unified_cache_external_linker": (
        "unified_cache_external_linker_backend unified_cache_external_linker_config enable_linker_mla_dedup"
    ),
    "enable_lmcache": "lmcache_config_file",
    "enable_flexkv": "flexkv_config_file",
    "enable_hisparse": "hisparse_config",
    "enable_memory_saver": "enable_weights_cpu_backup",
    "enable_pdmux": "pdmux_config_path sm_group_num",
    "dllm_algorithm": "dllm_algorithm_config dllm_fdfo",
    "pp_size": "pp_max_micro_batch_size pp_async_batch_depth enable_dynamic_chunking",
    "enable_two_batch_overlap": "tbo_token_distribution_threshold",
    "enable_torch_compile": "enable_torch_compile_debug_mode torch_compile_max_bs cuda_graph_tc_compiler",
    "elastic_ep_backend": (
        "ep_join_rank_offset elastic_ep_initial_size max_ep_size elastic_ep_scale_timeout enable_elastic_expert_backup"
    ),
    "enable_dp_attention": "speculative_skip_dp_mlp_sync enable_dp_attention_local_control_broadcast enable_dp_lm_head",
    "enable_prefill_cp": (
        "cp_strategy prefill_cp_mode dsa_prefill_cp_mode enable_cp_decode_attn_tp enable_dsa_cache_layer_split "
        "enable_cp_tp_group_sharing"
    ),
    "dcp_size": "dcp_comm_backend dcp_replicate_q_proj",
    "models with multi-head latent or sparse attention": (
        "speculative_dsa_topk_backend "
        "disable_chunked_prefix_cache flashinfer_mla_disable_ragged dsa_prefill_backend dsa_decode_backend "
        "dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union enable_dsa_fused_indexer qsa_indexer_dtype "
        "dsv4_attn_backend dsv4_prefill_backend enable_deepseek_v4_fp4_indexer c128_page_size"
    ),
    "models with states under drafts": "linear_attn_verify_backend enable_linear_replayssm_spec",
    "enable_int8_mamba_checkpoint": "int8_mamba_ckpt_size",
}
"""What is refused, an option's field or a kind of model -> fields that are read only with it."""
