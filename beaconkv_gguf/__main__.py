"""``python -m beaconkv_gguf``."""

from .cli import app

if __name__ == "__main__":
    app(prog_name="beaconkv-gguf")
