"""In the place of Mooncake's package for servers of tests: see ``engine``."""
