"""``python -m cloudckpt``."""

from cloudckpt.cli import main

if __name__ == "__main__":
    main()
