# Llama 3 8B on 32 GPUs, as Megatron-LM is started.
TP=2
PP=4
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --vocab-size 128256
    --swiglu
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
)
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py ${MODEL_ARGS[@]} \
    --micro-batch-size 1 --global-batch-size 128 --bf16 --lr 3e-4 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel
