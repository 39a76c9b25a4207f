from sglang_diffkv.calibrate.heads.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
