from sglang_diffkv.calibrate.layers.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
