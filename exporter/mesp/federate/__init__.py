"""Federated fine-tuning with Flower."""
