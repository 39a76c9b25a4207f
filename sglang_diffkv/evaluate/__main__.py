from sglang_diffkv.evaluate.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
