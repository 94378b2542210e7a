"""What runs a model. One folder for each; nothing outside them imports a tensor library."""
