from sglang_diffkv.shadow.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
