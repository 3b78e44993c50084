"""Federated fine-tuning with Flower: many people train, adapters travel, texts stay."""
