"""How far a server's replies to its own traffic are from a lossless one's: ``python -m sglang_diffkv.shadow --help``.

``exchange`` says which requests are looked at, ``judge`` asks both servers about one, and ``tally`` adds up what it
finds. ``proxy`` stands before the server and takes samples, ``report`` shows the figures, ``cli`` is the command.
"""

from sglang_diffkv.extra import SERVED, require

require("aiohttp", "requests", "rich", *SERVED)
