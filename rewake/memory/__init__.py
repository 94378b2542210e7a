"""What is remembered, where it is, and what of it a prompt can use. Handles ints, bytes and records; knows no tensors."""
