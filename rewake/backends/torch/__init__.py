"""PyTorch: transformers supplies the models, torch the matrix products, `kernels` the attention over coded pages."""
