"""Keys of a recipe with wrong types and values, and files that are no recipe.

A row is a change of a recipe, the kind of answer (``refused`` or ``accepted``) and a phrase of it.
"""

from pathlib import Path

import pytest

from tests.train import small
from tests.train.answers import ask, check, without_training


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a recipe."""
    monkeypatch.chdir(tmp_path)
    without_training(monkeypatch)
    small.write(tmp_path / "small.toml")


MODEL_AND_DATA = [
    ("description=3", "refused", "description = 3 of recipe 'small' must be a text"),
    ("source=[]", "refused", "source = [] of recipe 'small' must be a text"),
    ("optimizer=3", "refused", "optimizer = 3 of recipe 'small' must be a text"),
    ("optimizer=lbfgs", "refused", "has no optimizer 'lbfgs'"),
    ("model=3", "refused", "must be a table, [model]"),
    ("model.name=3", "refused", "model.name = 3 must be a text"),
    ("model.name=resnet21", "refused", "unknown model 'resnet21'"),
    ("model.name=gpt", "refused", "gpt wants text"),
    ("model.name=mlp", "accepted", "runs/small-kfac-s0"),
    ("model.wide=3", "refused", "unknown option model.wide"),
    ("model.width=0", "refused", "model.width = 0 is not a whole number from 1"),
    ("model.width=2.5", "refused", "model.width = 2.5 is not a whole number"),
    ("model.width=true", "refused", "model.width = True is not a whole number"),
    ("model.width=1000000", "refused", "is not a whole number from 1 to 100000"),
    ("model.stages=9", "refused", "are too small for 9 stages"),
    ("model.stages=1000000000000000000000", "refused", "a whole number from 1 to 1000"),
    ("model.convolutions=1000000000", "refused", "a whole number from 1 to 1000"),
    ("model.norm=1", "refused", "model.norm = 1 is not true or false"),
    ("data.name=imagenet", "refused", "unknown data set 'imagenet'"),
    ("data.name=7", "refused", "data.name = 7 must be a text"),
    ("data.path='x'", "refused", "unknown option data.path: digits has no options"),
    ("data.train=0", "refused", "data.train = 0 must be at least 1"),
    ("data.train=many", "refused", "data.train = 'many' must be a whole number"),
    ("data.train=1000000", "refused", "data.train = 1000000 is not a number of samples"),
    ("data.test=-1", "refused", "data.test = -1 must be at least 1"),
    ("data.test=true", "refused", "data.test = True must be a whole number"),
    ("data.holdout=0", "refused", "data.holdout = 0 must be at least 1"),
    ("data.holdout=128", "refused", "data.holdout = 128 is not a number of training samples"),
    ("data.augment=flip", "refused", "data.augment = 'flip' must be a list"),
    ("data.augment=[3]", "refused", "data.augment = 3 must be a text"),
    ("data.augment=['spin']", "refused", "unknown augmentation 'spin'"),
    ("data.augment=['crop:0']", "refused", "must be at least 1"),
    ("data.augment=['crop:x']", "refused", "unknown augmentation 'crop:x'"),
    ("data.augment=['flip:2']", "refused", "unknown augmentation 'flip:2'"),
    ("data.augment=['crop:100']", "refused", "'crop:100' can shift images of 8 x 8 pixels out"),
    ("data.augment=['crop:8']", "refused", "give at most crop:4"),
    ("data.augment=['crop:4']", "accepted", "runs/small-kfac-s0"),
]

TRAIN = [
    ("train.batch=1.5", "refused", "train.batch = 1.5 must be a whole number"),
    ("train.batch=true", "refused", "train.batch = True must be a whole number"),
    ("train.batch=10000000000000000000000", "refused", "must be at most 1000000000000"),
    ("train.steps=0", "refused", "train.steps = 0 must be at least 1"),
    ("train.steps=10000000000000000000000", "refused", "must be at most 1000000000000"),
    ("train.epochs=soon", "refused", "train.epochs = 'soon' must be a number"),
    ("train.seed=x", "refused", "train.seed = 'x' must be a whole number"),
    ("train.target=96", "refused", "train.target = 96.0 must be an accuracy in (0, 1]"),
    ("train.target=0", "refused", "must be an accuracy in (0, 1]"),
    ("train.target_loss=nan", "refused", "train.target_loss = nan must be a positive number"),
    ("train.target_loss=-1", "refused", "train.target_loss = -1.0 must be a positive number"),
    ("train.evaluate_every=0", "refused", "must be a positive number of epochs"),
    ("train.evaluate_every=1e-320", "accepted", "runs/small-kfac-s0"),
    ("train.evaluate_batch=0", "refused", "train.evaluate_batch = 0 must be at least 1"),
    ("train.evaluate_batch=100000000000000000000", "refused", "must be at most 1000000000000"),
    ("train.label_smoothing=1", "refused", "must be in [0, 1)"),
    ("train.label_smoothing=nan", "refused", "must be in [0, 1)"),
    ("train.mixup=-1", "refused", "train.mixup = -1.0 must be at least 0"),
    ("train.mixup=1e-300", "refused", "must be 0, or from 0.001 to 1000"),
    ("train.weight_rescaling=1", "refused", "train.weight_rescaling = 1 must be true or false"),
    ("train.precision=float16", "refused", "did you mean 'bfloat16'?"),
    ("train.precision=16", "refused", "train.precision = 16 is not supported"),
    ("train.precision=[]", "refused", "train.precision = [] is not supported"),
    ("train.micro_batches=3", "refused", "choose a multiple of 3"),
    ("train.micro_batches=0", "refused", "train.micro_batches = 0 must be at least 1"),
    ("train.channels_last=yes", "refused", "must be true or false"),
    ("train.compile=0", "refused", "train.compile = 0 must be true or false"),
    ("train.clip=-1", "refused", "train.clip = -1.0 must be at least 0"),
    ("train.clip=nan", "refused", "train.clip = nan must be at least 0"),
    ("train.deterministic=no", "refused", "must be true or false"),
    ("train.log_every=0", "refused", "train.log_every = 0 must be at least 1"),
    ("train.checkpoint_every=-1", "refused", "train.checkpoint_every = -1.0 must be at least 0"),
    ("train.checkpoint_every=inf", "refused", "train.checkpoint_every = inf must be at least 0"),
    ("train.epoch=1", "refused", "did you mean 'epochs'?"),
]

SCHEDULE = [
    ("schedule.shape=zigzag", "refused", "schedule shape='zigzag' is unknown"),
    ("schedule.shape=3", "refused", "schedule.shape = 3 must be a text"),
    ("schedule.shape=steps", "refused", "set schedule.milestones"),
    ("schedule.warmup=-1", "refused", "schedule.warmup = -1.0 must be 0 epochs or more"),
    ("schedule.warmup=nan", "refused", "schedule.warmup = nan must be 0 epochs or more"),
    ("schedule.warmup=3", "refused", "is not shorter than the run"),
    ("schedule.warmup_share=1", "refused", "schedule.warmup_share = 1.0 must be in [0, 1)"),
    ("schedule.warmup_from=2", "refused", "warmup_from=2.0 must be a number in [0, 1]"),
    ("schedule={warmup_from=0.5}", "refused", "has no warm-up to begin"),
    ("schedule.start=5", "refused", "must be epochs with 0 <= start < end"),
    ("schedule.start=nan", "refused", "must be epochs with 0 <= start < end"),
    ("schedule.end=0.1", "refused", "must be epochs with 0 <= start < end"),
    ("schedule.power=2", "refused", "schedule power=2.0 is no option of shape 'cosine'"),
    ("schedule.milestones=[1]", "refused", "is no option of shape 'cosine'"),
    ("schedule.milestones=3", "refused", "schedule.milestones = 3 must be a list"),
    ("schedule={shape='steps', milestones=['a']}", "refused", "= 'a' must be a number"),
    ("schedule={shape='steps', milestones=[-1]}", "refused", "must be epochs"),
    ("schedule={shape='steps', milestones=[1], gamma=2}", "refused", "must be a number in [0, 1]"),
    ("schedule={shape='polynomial', power=0}", "refused", "must be a positive number"),
    ("schedule.tied_momentum=1", "refused", "schedule.tied_momentum = 1 must be true or false"),
    ("schedule.speed=1", "refused", "unknown key 'speed' in [schedule]"),
]

OPTIMIZERS = [
    ("sgd", "lr='x'", "refused", "optimizers.sgd.lr = 'x' must be a number of at least 0"),
    ("sgd", "momentum=2", "refused", "optimizers.sgd.momentum = 2 must be a number in [0, 1)"),
    ("sgd", "momentum=-0.1", "refused", "momentum = -0.1 must be a number in [0, 1)"),
    ("sgd", "momentum=0", "refused", "[optimizers.sgd]: Nesterov momentum requires"),
    ("sgd", "dampening=0.1", "refused", "[optimizers.sgd]: Nesterov momentum requires"),
    ("sgd", "dampening=2", "refused", "dampening = 2 must be a number in [0, 1]"),
    ("sgd", "nesterov=1", "refused", "optimizers.sgd.nesterov = 1 must be true or false"),
    ("sgd", "weight_decay=-1", "refused", "weight_decay = -1 must be a number of at least 0"),
    ("sgd", "weight_decay=nan", "refused", "weight_decay = nan must be a number of at least 0"),
    ("sgd", "damping=1", "refused", "unknown key 'damping' in [optimizers.sgd]"),
    ("sgd", "kind=[]", "refused", "unknown kind [] of optimizer"),
    ("sgd", "train=3", "refused", "must be a table, [train]"),
    ("sgd", "train.batch=0", "refused", "train.batch = 0 must be at least 1"),
    ("sgd", "train.size=1", "refused", "unknown key 'size' in [optimizers.sgd.train]"),
    ("sgd", "schedule=1", "refused", "must be a table, [schedule]"),
    ("sgd", "steps=-1", "refused", "train.steps = -1 must be at least 1"),
    ("adamw", "betas=[0.9]", "refused", "must be two numbers in [0, 1)"),
    ("adamw", "betas=[0.9, 1.5]", "refused", "must be two numbers in [0, 1)"),
    ("adamw", "betas=0.9", "refused", "must be two numbers in [0, 1)"),
    ("adamw", "eps=-1", "refused", "eps = -1 must be a number of at least 0"),
    ("adamw", "amsgrad=2", "refused", "amsgrad = 2 must be true or false"),
    ("muon", "momentum=1", "refused", "momentum = 1 must be a number in [0, 1)"),
    ("muon", "ns_steps=0", "refused", "ns_steps = 0 must be a whole number from 1 to 99"),
    ("muon", "ns_steps=100", "refused", "must be a whole number from 1 to 99"),
    ("muon", "adjust_lr_fn=3", "refused", "adjust_lr_fn = 3 must be a text"),
    ("muon", "adjust_lr_fn=x", "refused", "[optimizers.muon]: "),
    ("muon", "other_lr=-1", "refused", "other_lr = -1 must be a number of at least 0"),
    ("muon", "other_betas=x", "refused", "must be two numbers in [0, 1)"),
    ("kfac", "base=adam", "refused", "optimizers.kfac.base = 'adam' is not supported"),
    ("kfac", "base=[]", "refused", "optimizers.kfac.base = [] is not supported"),
    ("kfac", "base_momentum=2", "refused", "base_momentum = 2 must be a number in [0, 1)"),
    ("kfac", "base_momentum=x", "refused", "base_momentum = 'x' must be a number in [0, 1)"),
    ("kfac", "base_nesterov=true", "refused", "[optimizers.kfac]: Nesterov momentum requires"),
    ("kfac", "betas=[0.9, 0.99]", "refused", "is an option of base 'adamw', not of 'sgd'"),
    ("kfac", "other=sgd", "refused", "optimizers.kfac.other = 'sgd' is not supported"),
    ("kfac", "other=[]", "refused", "optimizers.kfac.other = [] is not supported"),
    ("kfac", "other_betas=[0.9, 0.99]", "refused", "other_betas needs optimizers.kfac.other"),
    ("kfac", "other_momentum=2", "refused", "other_momentum = 2 must be a number in [0, 1)"),
    ("kfac", "other_weight_decay=-1", "refused", "must be a number of at least 0"),
    ("kfac", "damping=0", "refused", "damping=0 must be a positive finite number"),
    ("kfac", "damping=auto", "refused", "damping='auto' must be a positive finite number"),
    ("kfac", "damping={start=1}", "refused", "is no schedule; it must look like"),
    ("kfac", "damping={begin=1}", "refused", "unknown key 'begin' in the schedule of damping"),
    ("kfac", "factor_every=0", "refused", "factor_every=0 must be a whole number"),
    ("kfac", "factor_every=1.5", "refused", "factor_every=1.5 must be a whole number"),
    ("kfac", "refresh_every={stale=-1}", "refused", "refresh_every"),
    ("kfac", "refresh_every={stale='x'}", "refused", "refresh_every"),
    ("kfac", "decay=2", "refused", "decay=2 must be a number in [0, 1]"),
    ("kfac", "fisher=true", "refused", "fisher=True is not supported"),
    ("kfac", "sharing=some", "refused", "sharing='some' is not supported"),
    ("kfac", "solver=lu", "refused", "solver='lu' is not supported"),
    ("kfac", "power=2", "refused", "power=2 must be a number in (0, 1]"),
    ("kfac", "momentum=1", "refused", "momentum=1 must be a number in [0, 1)"),
    ("kfac", "nesterov=1", "refused", "nesterov=1 must be True or False"),
    ("kfac", "rescale=long", "refused", "rescale='long' is not supported"),
    ("kfac", "rescale=quadratic", "refused", "runs each batch several times"),
    ("kfac", "kl_clip=0", "refused", "kl_clip=0 must be a positive finite number"),
    ("kfac", "early_refresh=1", "refused", "early_refresh=1 must be True or False"),
    ("kfac", "stagger=x", "refused", "stagger='x' must be True or False"),
    ("kfac", "max_dim=0", "refused", "max_dim=0 must be a whole number of at least 1"),
    ("kfac", "loss_average=0", "refused", "loss_average=0 is not supported"),
    ("kfac", "include=3", "refused", "include holds 3"),
    ("kfac", "exclude=[1]", "refused", "exclude holds 1"),
    ("kfac", "on_missing=cry", "refused", "on_missing='cry' is not supported"),
    ("kfac", "max_grad_norm=0", "refused", "max_grad_norm=0 must be a positive"),
    ("kfac", "distribute=widely", "refused", "distribute"),
    ("kfac", "distribute=2.5", "refused", "[optimizers.kfac]: "),
    ("kfac", "model=x", "refused", "unknown key 'model' in [optimizers.kfac]"),
]

CHANGES = [
    *((["--set", change], kind, phrase) for change, kind, phrase in MODEL_AND_DATA),
    *((["--set", change], kind, phrase) for change, kind, phrase in [*TRAIN, *SCHEDULE]),
    *(
        (["--optimizer", name, "--set", f"optimizers.{name}.{change}"], kind, phrase)
        for name, change, kind, phrase in OPTIMIZERS
    ),
]


@pytest.mark.parametrize(
    ("flags", "kind", "phrase"),
    [
        pytest.param(*row, id=f"{row[0][-1]}", marks=[pytest.mark.slow] if number % 2 else [])
        for number, row in enumerate(CHANGES)
    ],
)
def test_keys(flags: list[str], kind: str, phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    check(ask(["train", "small.toml", *flags], capsys), kind, phrase)


HEAD = '[model]\nname = "cnn"\n[data]\nname = "digits"\n[train]\nbatch = 8\nsteps = 2\n'
FILES = [
    ("", "recipe 'bad' is empty: it needs [model], [data], [train] and [optimizers.NAME]"),
    ("# nothing\n", "recipe 'bad' is empty"),
    ("[train]\n", "[train] has no 'batch'; give one, for example train.batch = 64."),
    ("[train]\nbatch = 4\n", "[train] needs either 'epochs' or 'steps', and not both"),
    ("[train]\nsteps = 3\n", "for example train.batch = 64."),
    ("[train]\nsteps = 3\nepochs = 1\nbatch = 4\n", "[train] needs either"),
    ("[train]\nsteps = 3\nbatch = 4\n", "recipe 'bad' has no [optimizers.NAME]"),
    (HEAD + "[optimizers]\n", "recipe 'bad' has no [optimizers.NAME]"),
    (HEAD + "[optimizers.sgd]\n", "[optimizers.sgd] has no 'lr'"),
    (HEAD + '[optimizers."a/b"]\nkind = "sgd"\nlr = 1\n', "cannot be the name of an optimizer"),
    (HEAD + '[optimizers."a,b"]\nkind = "sgd"\nlr = 1\n', "cannot be the name of an optimizer"),
    (HEAD + '[optimizers.""]\nkind = "sgd"\nlr = 1\n', "cannot be the name of an optimizer"),
    (HEAD + "[optimizers]\nsgd = 3\n", "must be a table"),
    (HEAD.replace('name = "cnn"\n', "") + "[optimizers.sgd]\nlr = 1\n", 'model.name = "cnn".'),
    (HEAD.replace('name = "digits"\n', "") + "[optimizers.sgd]\nlr = 1\n", 'data.name = "digits".'),
    ("[[train]]\nbatch = 3\n", "must be a table, [train]"),
    ("[trian]\nbatch = 3\n", "unknown key 'trian' in recipe 'bad'; did you mean 'train'?"),
    ("train", "is no valid TOML"),
    ("x = " + "[" * 5000, "is no valid TOML"),
    ("x = 1" + "0" * 5000, "is no valid TOML"),
    ("x = 1979-05-27", "unknown key 'x'"),
    ("\ufeff[train]\n", "is no valid TOML"),
]


@pytest.mark.parametrize(("text", "phrase"), FILES, ids=[row[1] for row in FILES])
def test_files(text: str, phrase: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_text(text, encoding="utf-8")
    check(ask(["train", "bad.toml"], capsys), "refused", phrase)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00\x01\x02"])
def test_a_file_of_bytes_is_no_recipe(content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.toml").write_bytes(content)
    check(ask(["train", "bad.toml"], capsys), "refused", "is no valid TOML")
