"""Pretrain a GPT model with Megatron: an ordinary script, which knows nothing of any particular MoE dispatcher.

Takes Megatron's own command line; runs with megatron-core 0.17 to 0.19::

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --moe-token-dispatcher-type mok <Megatron arguments>

Data, tensor, pipeline and expert parallelism work as in any Megatron script; context parallelism is refused.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import arguments as megatron_arguments
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor


def model_provider(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> GPTModel:
    """The model, or this pipeline stage of it, as Megatron's command line describes it.

    Raises ValueError for context parallelism: every rank would be given whole sequences in place of its part.
    """
    args = get_args()
    if args.context_parallel_size > 1:
        raise ValueError(
            f"--context-parallel-size {args.context_parallel_size}: this script does not split sequences; "
            f"leave it at 1, or use Megatron's pretrain_gpt.py"
        )
    config = core_transformer_config_from_args(args)
    use_te = args.transformer_impl == "transformer_engine"
    options = {"use_transformer_engine": use_te, "normalization": args.normalization, "qk_l2_norm": args.qk_l2_norm}
    if args.num_experts:
        layer_spec = get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **options)
    else:
        make_spec = get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec
        layer_spec = make_spec(qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention)
    mtp_spec = None
    if args.mtp_num_layers:
        # Multi-token prediction repeats the last decoder layer, wherever the pipeline puts that one.
        last_layer_spec = get_gpt_decoder_layer_specs(config, **options)[-1] if args.num_experts else layer_spec
        mtp_spec = get_gpt_mtp_block_spec(config, last_layer_spec, use_transformer_engine=use_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
    )


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> list[GPTDataset | None]:
    """Train, validation and test set over ``--data-path``, for the given numbers of samples."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend is None and blend_per_split is None:
        raise ValueError("no data: give --data-path PREFIX (scripts/prepare_corpus.py makes a small corpus)")
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, partial(_reads_data, vp_stage), config).build()


def _reads_data(vp_stage: int | None) -> bool:
    """Whether this pipeline stage embeds tokens or computes a loss. All tensor-parallel ranks read the data."""
    config = core_transformer_config_from_args(get_args())
    stage = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return (
        parallel_state.is_pipeline_first_stage(**stage)
        or parallel_state.is_pipeline_last_stage(**stage)
        or mtp_on_this_rank(layout=config.pipeline_model_parallel_layout, mtp_num_layers=config.mtp_num_layers, **stage)
    )


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses, the number of tokens that count, and both for the log.

    ``loss_mask`` and ``output`` are ``[B, S]``, masks 0 or 1 and losses per token.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: Any) -> tuple[Tensor, partial[Any]]:
    """One microbatch through this pipeline stage."""
    batch: dict[str, Tensor] = {}
    if data_iterator is not None:
        batch = {
            key: value.cuda(non_blocking=True) for key, value in next(data_iterator).items() if torch.is_tensor(value)
        }
    loss_mask: Any = batch.get("loss_mask")
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        batch.get("attention_mask"),
        labels=batch.get("labels"),
        loss_mask=loss_mask,
    )
    return output, partial(loss_func, loss_mask)


def use_shipped_index_builder() -> None:
    """Skip Megatron's ``make`` of its dataset helpers where the wheel ships them built, but without their Makefile."""
    built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    if built and not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    use_shipped_index_builder()
    datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    call: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:  # since megatron-core 0.18 the caller parses
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        call["cfg_container"] = pretrain_cfg_container_from_args(megatron_arguments.parse_and_validate_args())
    pretrain(**call)


if __name__ == "__main__":
    main()
