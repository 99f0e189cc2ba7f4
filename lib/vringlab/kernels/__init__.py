"""Base kernels, patches and the modules built from them."""
