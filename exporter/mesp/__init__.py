"""MeSP: exact, memory-efficient LoRA fine-tuning of quantized language models."""

__version__ = "0.1.0"
