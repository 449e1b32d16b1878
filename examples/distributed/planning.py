"""What a step of Qwen3-8B needs on 8 GPUs of 80 GiB with FSDP2. Nothing is run, no weight is allocated."""

import streambp_fx
from streambp_fx.commands.plan import print_plan

plan = streambp_fx.plan(
    "Qwen3-8B",  # or a model, a config.json, a directory with one
    gpus=8,
    gpu_memory="80GiB",
    shard="fsdp2",  # or ddp, zero1, zero2, zero3
    interconnect="nvlink",  # or pcie, ib400, or GB/s
    optimizer="adamw",
)
print_plan(plan)  # as `streambp-fx plan Qwen3-8B --gpus 8 ...` does; plan.as_dict() is for programs
