from pathlib import Path

import mesp

ROOT = Path(__file__).parents[2]
APP = ROOT / "ios" / "MeSPTrainer"
DEMO_BUNDLE = APP / "Demo.mesp"
DEMO_MODEL = Path(mesp.__file__).parent / "demo_model"
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
