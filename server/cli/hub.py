"""Finds the folder of a model: the embedded one, a path, or a repository of the Hub. It downloads
configuration, tokenizer and safetensors only; never code, never pickle."""

from __future__ import annotations

import logging
import re
from importlib.resources import files
from pathlib import Path

import msgspec
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is its HTTP library's
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from headway.engine import NAMED_DRAFTERS, EngineConfig, ModelError, is_folder
from headway.server.base.config import ModelSource
from headway.server.cli.redaction import without_credentials

EMBEDDED = "headway.engine.demo"
EMBEDDED_NAME = "headway-demo"
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED_FILES = ["*/*"]
_URL_LOGGERS = ("httpx", "httpx2")  # these log each URL, including a password in HF_ENDPOINT
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def model_folder(source: ModelSource, *, may_download: bool = True) -> Path:
    """Returns the model's folder, which it downloads if necessary and allowed. Raises ModelError."""
    path = Path(str(files(EMBEDDED))) if source.name is None else _path(source.name)
    if is_folder(path):
        if source.revision is not None:
            raise ModelError(
                f"--revision is {source.revision}, but {path} is a folder and no repository of the Hub; leave --revision out"
            )
        return path
    assert source.name is not None, "the embedded model is a folder"
    if not _REPOSITORY.fullmatch(source.name):
        raise ModelError(
            f"{without_credentials(source.name)} is neither a folder nor the ORG/NAME of a Hub repository; "
            "give the path of a folder with config.json, tokenizer.json and *.safetensors"
        )
    return _download(source.name, source) if may_download else _downloaded(source.name, source)


def with_folders(config: EngineConfig, folder: Path, *, may_download: bool = True) -> EngineConfig:
    """Returns the configuration with the folder of the model, and with that of the drafter which --drafter
    names by a path or as ORG/NAME. Downloads the drafter if necessary and allowed. Raises ModelError."""
    drafter = config.drafter_path
    if drafter is not None and config.depth > 0:
        if not is_folder(_path(drafter)) and not _REPOSITORY.fullmatch(drafter):
            raise ModelError(
                f"--drafter is {without_credentials(drafter)}; it must be {', '.join(NAMED_DRAFTERS)}, the path of a "
                "drafter's folder, or the ORG/NAME of its Hub repository"
            )
        drafter = str(model_folder(ModelSource(drafter), may_download=may_download))
    return msgspec.structs.replace(config, model_path=str(folder), drafter_path=drafter)


def model_name(source: ModelSource) -> str:
    """Returns the model's name in the API unless --served-model-name says otherwise."""
    if source.name is None:
        return EMBEDDED_NAME
    path = _path(source.name)
    # The working directory may have a name that is not UTF-8, which no answer could carry.
    return path.resolve().name.encode(errors="replace").decode() if is_folder(path) else source.name


def _path(name: str) -> Path:
    """Returns the path; ~ and ~user stand for home directories."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # there is no such user
        raise ModelError(f"{name} is no path: {error}; give the folder's full path") from None


def _downloaded(repository: str, source: ModelSource) -> Path:
    """Returns the folder of an earlier download, complete or not."""
    try:
        folder = snapshot_download(repository, revision=source.revision, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"{repository} is not on this machine ({_first_line(error)}); let `hf download {repository}` or `headway serve "
            f"{repository}` fetch it, or give the path of a folder"
        ) from None
    return Path(folder)


def _download(repository: str, source: ModelSource) -> Path:
    for name in _URL_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        folder = snapshot_download(
            repository,
            revision=source.revision,
            allow_patterns=WANTED_FILES,
            ignore_patterns=UNWANTED_FILES,
        )
    except GatedRepoError as error:
        raise ModelError(
            f"{repository} is gated: accept its terms on its page and give a token of your account in HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the Hub has no repository {repository}, or it is private (then give a token in HF_TOKEN)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{repository} has no revision {source.revision}; give a branch, tag or commit"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelError(f"{repository} cannot be fetched: {without_credentials(str(error))}") from None
    except UnicodeEncodeError:
        raise ModelError(
            "HF_TOKEN or HF_ENDPOINT has characters that are not ASCII; copy the token again from the Hub's settings"
        ) from None
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        raise ModelError(
            f"the Hub cannot be reached and {repository} is not complete in the local cache ({_first_line(error)}); "
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE, or serve a local folder: headway serve PATH"
        ) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return without_credentials(str(error).strip().partition("\n")[0]) or type(error).__name__
