"""Personalized models in files: written into a folder, and loaded from it.

A folder has a safetensors file for each client, and manifest.json, which has all that a
reader needs: docs/formats.md describes both.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pflcore.algorithms import ALGORITHMS, Algorithm, FedAvg, algorithm_of
from pflcore.algorithms._protocol import Tensors
from pflcore.check import Words, checked, client_id, reject, require
from pflcore.data._inputs import Field, Fields
from pflcore.data._read_errors import one_line
from pflcore.data._scaling import Scaling
from pflcore.nn._layers import build_module, describe_module
from pflcore.simulation._evaluate import has_custom_predict
from pflcore.simulation._files import atomic_write
from pflcore.simulation._models import Personalized
from pflcore.simulation.checkpoint import write_tensors
from pflcore.simulation.record import to_json
from pflcore.train import Net
from pflcore.train._losses import LOSSES

MANIFEST_FILE = "manifest.json"
MANIFEST_TEXT = "a folder that history.export has written"
LOAD_HINT = (
    "model.load_state_dict(safetensors.torch.load_file(file)) into a model of the "
    "run's class; model.eval()(x) gives the scores."
)
SCALING_HINT = (
    "The model takes standardized features: of raw ones x = ((raw.double() - mean) / "
    "deviation).float(), by the client's mean and deviation here. "
)
COLUMNS_HINT = "Features are in the order of columns. "
CLASSES_HINT = "Scores are in the order of class_names. "
USE_HINT = (
    "pflcore.simulation.load_model(folder, client).predict(raw) and `pflcore predict "
    "FOLDER new.csv --client NAME` do all of this."
)
ModelFactory = nn.Module | Callable[[], nn.Module]


# writing ----------------------------------------------------------------------


def export_models(
    models: Iterable[Personalized],
    header: Mapping[str, Any],
    folder: str | Path,
) -> None:
    """Writes the models of clients 0, 1, ... into files; see `History.export`."""
    folder = Path(folder)
    clients = list[dict[str, Any]]()
    manifest = {"method": header["algorithm"]}
    for key in ("options", "training", "data", "model"):
        manifest[key] = header.get(key)
    manifest["clients"] = clients
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for client, model in enumerate(models):
            clients.append(_export_model(model, client, folder))
            if client == 0:
                manifest |= _common_facts(model)
        # The manifest comes last, so that all files that it names are there.
        with atomic_write(folder / MANIFEST_FILE) as part:
            part.write_text(json.dumps(manifest, indent=1) + "\n")
    except OSError as e:
        raise OSError(
            f"export: {folder} cannot be written ({e.strerror or e}); make room there, "
            "or name another folder."
        ) from None


def _export_model(model: Personalized, client: int, folder: Path) -> dict[str, Any]:
    """Writes one client's model; returns its entry of the manifest."""
    tensors = model.tensors()
    file = f"client-{client}.safetensors"
    with atomic_write(folder / file) as part:
        write_tensors(part, tensors)
    entry: dict[str, Any] = {"client": client}
    if model.name is not None:
        entry["name"] = model.name
    if model.scaling is not None:
        for name, tensor in model.scaling.state_dict().items():
            entry[name] = tensor.tolist()
    entry["file"] = file
    entry["tensors"] = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return entry


def _common_facts(model: Personalized) -> dict[str, Any]:
    """The part of the manifest that is the same for all clients."""
    net = model.net
    is_one_model = not has_custom_predict(model.algorithm)
    # A file of several models lacks the tensors that no client trains.
    is_whole = is_one_model or not _untrained_names(net)
    return {
        "returns": model.returns,
        "predict": _prediction_hint(model),
        "use": _use_hint(model),
        "columns": to_json(model.columns),
        "classes": model.classes,
        "class_names": to_json(model.class_names),
        "fields": to_json(net.fields),
        "loss": _loss_name(net),
        "head": net.head_name,
        "dtype": str(net.dtype).removeprefix("torch."),
        "state_dict": is_one_model,
        "layers": describe_module(net.module_without_fields()) if is_whole else None,
    }


def _untrained_names(net: Net) -> list[str]:
    """The names of tensors that are in no row, but for counts of batches."""
    in_rows = {*net.names, *net.buffer_names}
    names = [name for name in net.module.state_dict() if name not in in_rows]
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _loss_name(net: Net) -> str:
    """The name of a loss by which the same scores have the same meaning."""
    for name, loss in LOSSES.items():
        if net.loss_fn is loss:
            return name
    return "cross_entropy" if net.scores_classes else "squared"


def _prediction_hint(model: Personalized) -> str:
    """The way to predict with a model's exported tensors, in words."""
    hint = None
    if has_custom_predict(model.algorithm):
        hint = inspect.getdoc(model.algorithm.predict)
    hint = hint or LOAD_HINT
    return hint if model.scaling is None else SCALING_HINT + hint


def _use_hint(model: Personalized) -> str:
    """The order of features and scores, and the call that predicts, in words."""
    hint = COLUMNS_HINT if model.columns else ""
    if model.class_names:
        hint += CLASSES_HINT
    return hint + USE_HINT


# loading ----------------------------------------------------------------------


@checked
def load_model(
    folder: str | Path,
    client: int | str,
    model: Any = None,
    algorithm: Algorithm | type[Algorithm] | str | None = None,
) -> Personalized:
    """One client's model from a folder that `History.export` has written.

    It predicts as `History.model(client)` does, from raw features. Raises ValueError
    where the folder has no such client, or where the model cannot be made of it.

    Args:
        folder: The folder with manifest.json.
        client: The id or the name of the client.
        model: A module of the run's architecture, or a function that makes one. None
            where the layers are those of torch or pflcore: the manifest has them.
        algorithm: The algorithm of the run. None for one of pflcore: the manifest has
            its name and options.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    names = client_names(manifest)
    number = client_id("client", client, len(manifest["clients"]), names)
    entry = manifest["clients"][number]
    tensors = _load_tensors(folder / entry["file"])
    net = _make_net(manifest, model)
    facts = {
        "classes": manifest["classes"],
        "scaling": _read_scaling(entry),
        "name": entry.get("name"),
        "columns": manifest["columns"],
        "class_names": manifest["class_names"],
    }
    try:
        if manifest["state_dict"]:
            net.module.load_state_dict(tensors)
            row = net.row(net.module)
            # Buffers that no file has are those of the model.
            buffers = _buffer_row(net, dict(net.module.named_buffers()))
            # FedAvg predicts by one model, as the algorithm of the run does.
            return Personalized(FedAvg(), net, {"w": row}, buffers, **facts)
        alg = _make_algorithm(manifest, algorithm)
        if model is not None:
            net = alg.prepare(net)
        statistics = {
            name.removeprefix("statistics."): tensor
            for name, tensor in tensors.items()
            if name.startswith("statistics.")
        }
        parts = {k: v for k, v in tensors.items() if not k.startswith("statistics.")}
        buffers = _buffer_row(net, statistics)
        return Personalized(alg, net, _join_parts(net, parts), buffers, **facts)
    except (RuntimeError, KeyError) as e:
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        raise ValueError(
            f"model: expected the run's architecture, whose tensors are {shapes}, got "
            f"{type(net.module).__name__}; give the function that made it."
        ) from e


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder of models.

    Raises ValueError where there is none, or one in which something that `load_model`
    needs is missing or is of another kind.
    """
    path = folder / MANIFEST_FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        reject("folder", MANIFEST_TEXT, Words(f"{path} ({e.strerror or e})"))
    except ValueError:
        reject("folder", MANIFEST_TEXT, Words(f"{path}, which is no JSON"))
    keys = manifest if isinstance(manifest, dict) else {}
    missing = [key for key in MANIFEST_FORMS if key not in keys]
    words = f"{MANIFEST_TEXT} with this version"
    got = Words(f"{path} without {', '.join(missing)}")
    require(not missing, "folder", words, got)
    damaged = [key for key, fits in MANIFEST_FORMS.items() if not fits(manifest[key])]
    got = Words(f"{path}, which is damaged at {', '.join(damaged)}")
    require(not damaged, "folder", words, got, remedy="export the models again")
    return dict(manifest)


def _is_text(value: Any) -> bool:
    """True for a text."""
    return isinstance(value, str)


def _are_names(value: Any) -> bool:
    """True for a list of texts, or None."""
    return value is None or (isinstance(value, list) and all(map(_is_text, value)))


def _is_count(value: Any) -> bool:
    """True for a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_shape(value: Any) -> bool:
    """True for a list of whole numbers above 0."""
    return isinstance(value, list) and all(map(_is_count, value))


def _dtype_of(name: Any) -> torch.dtype | None:
    """The dtype of a name such as "float32" or "torch.float32"; None for no dtype."""
    dtype = getattr(torch, str(name).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _is_float_dtype(value: Any) -> bool:
    """True for the name of a dtype of floats."""
    dtype = _dtype_of(value)
    return dtype is not None and dtype.is_floating_point


def _is_field(value: Any) -> bool:
    """True for the name, the shape and the dtype of a field."""
    if not isinstance(value, list) or len(value) != 3:
        return False
    name, shape, dtype = value
    return _is_text(name) and _is_shape(shape) and _dtype_of(dtype) is not None


def _are_entries(value: Any) -> bool:
    """True for a list of one or more clients' entries."""
    return isinstance(value, list) and bool(value) and all(map(_is_entry, value))


def _is_entry(value: Any) -> bool:
    """True for a client's entry: its file, and its scaling where it has one."""
    if not isinstance(value, dict) or not _is_text(value.get("file")):
        return False
    scaling = [value[key] for key in ("mean", "deviation") if key in value]
    try:
        shapes = [torch.tensor(x, dtype=torch.float64).shape for x in scaling]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False
    return len(shapes) in (0, 2) and len(set(shapes)) < 2


# What `load_model` reads of a manifest, with the kind of each value.
MANIFEST_FORMS: dict[str, Callable[[Any], bool]] = {
    "method": _is_text,
    "clients": _are_entries,
    "options": lambda value: isinstance(value, dict),
    "columns": _are_names,
    "classes": lambda value: value is None or _is_count(value),
    "class_names": _are_names,
    "fields": lambda value: (
        value is None or (isinstance(value, list) and all(map(_is_field, value)))
    ),
    "loss": lambda value: _is_text(value) and value in LOSSES,
    "head": lambda value: value is None or _is_text(value),
    "dtype": _is_float_dtype,
    "state_dict": lambda value: isinstance(value, bool),
    "layers": lambda value: value is None or isinstance(value, dict),
}


def client_names(manifest: Mapping[str, Any]) -> list[str] | None:
    """The names of the clients in a manifest; None where they have none."""
    entries = manifest["clients"]
    if not all("name" in entry for entry in entries):
        return None
    return [str(entry["name"]) for entry in entries]


def _load_tensors(path: Path) -> Tensors:
    """The tensors of a safetensors file.

    Raises ValueError where the file is absent or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise ValueError(
            f"folder: {path} is no whole safetensors file ({e}); export the models "
            "again."
        ) from None


def _read_scaling(entry: Mapping[str, Any]) -> Scaling | None:
    """The statistics of a client's features in its entry, if they are there."""
    if "mean" not in entry:
        return None
    mean = torch.tensor(entry["mean"], dtype=torch.float64)
    return Scaling(mean, torch.tensor(entry["deviation"], dtype=torch.float64))


def _make_net(manifest: Mapping[str, Any], model: ModelFactory | None) -> Net:
    """The net of the run, whose weights are still to be loaded.

    Raises ValueError where the manifest does not tell how to make the model.
    """
    if model is None and manifest["layers"] is not None:
        try:
            model = build_module(manifest["layers"])
        except Exception as e:  # damaged layers may fail in any way
            raise ValueError(
                "model: the manifest's layers cannot be built; give the function that "
                f"made the model, load_model(..., model=function) ({one_line(e)})."
            ) from None
    if model is None:
        remedy = (
            "give the function that made the model: load_model(..., model=function), "
            "or --model package.module:function"
        )
        words = "a model, as the manifest cannot rebuild this one"
        reject("model", words, manifest.get("model"), remedy=remedy)
    module = Net(model).module.to(_dtype_of(manifest["dtype"]))
    # A model of another architecture is reported where its tensors are loaded.
    has_head = manifest["head"] in dict(module.named_modules())
    head = manifest["head"] if has_head else None
    net = Net(module, manifest["loss"], head=head)
    return net.with_fields(_read_fields(manifest["fields"]))


def _read_fields(entries: Sequence[Any] | None) -> Fields | None:
    """The fields of samples that a manifest lists."""
    if entries is None:
        return None
    parts = []
    for name, shape, dtype in entries:
        parts.append(Field(name, tuple(shape), _dtype_of(dtype) or torch.float32))
    return Fields(parts)


def _make_algorithm(
    manifest: Mapping[str, Any], algorithm: Algorithm | type[Algorithm] | str | None
) -> Algorithm:
    """The algorithm of the run, which makes scores of several models.

    Raises ValueError for one that is not pflcore's.
    """
    if algorithm is not None:
        return algorithm_of(algorithm)
    cls = ALGORITHMS.get(manifest["method"])
    if cls is None:
        remedy = "give it: load_model(..., algorithm=MyAlgorithm())"
        words = "one of pflcore's algorithms"
        reject("algorithm", words, manifest["method"], remedy=remedy)
    names = [field.name for field in fields(cls) if field.init]
    options = {k: v for k, v in manifest["options"].items() if k in names}
    return algorithm_of(cls, **options)


def _buffer_row(net: Net, statistics: Mapping[str, Tensor]) -> Tensor:
    """Batch norm's statistics as a row [b]."""
    pieces = [statistics[name].reshape(-1).to(net.w0) for name in net.buffer_names]
    return torch.cat([net.w0[:0], *pieces])


def _join_parts(net: Net, tensors: Tensors) -> Tensors:
    """The tensors that `predict` takes, of the parameters that rows were split into.

    It is the inverse of what `Personalized.tensors` does.
    """
    model: Tensors = {}
    parts_of: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        key, _, parameter = name.partition(".")
        if parameter in net.names:
            parts_of.setdefault(key, {})[parameter] = tensor
        else:
            model[name] = tensor
    for key, parts in parts_of.items():
        pieces = [parts[name].reshape(-1) for name in net.names if name in parts]
        model[key] = torch.cat(pieces)
    return model
