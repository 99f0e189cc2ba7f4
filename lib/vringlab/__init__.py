"""vringlab: checks the performance claims of virtio, vsock and vhost kernel patches."""

__version__ = "0.1.0"
