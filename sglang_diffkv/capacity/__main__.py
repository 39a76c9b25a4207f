from sglang_diffkv.capacity.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
