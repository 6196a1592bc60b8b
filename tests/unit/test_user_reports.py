"""Failures that users of training frameworks reported: the situations that no other test has. See docs/cases.md."""

import pickle
import random
from pathlib import Path

import psutil
import torch
from checkpoint_samples import make_manifest, save, two_ranks, whole
from hypothesis import given
from hypothesis import strategies as st
from test_commit import Driven, generation

from orchestrator import driver
from orchestrator.archive import RunArchive
from orchestrator.decide.budget import FailureBudget, Stop
from orchestrator.decide.ladder import Restore
from orchestrator.decide.lineage import GenerationRecord
from orchestrator.observe.ledger import Ledger
from orchestrator.recovery import replay
from workers.checkpoint import image
from workers.checkpoint.manifest import checkpoint_name
from workers.checkpoint.persist import write_shard
from workers.checkpoint.reader import CheckpointReader
from workers.checkpoint.slots import Slot
from workers.checkpoint.store import LocalStore
from workers.checkpoint.tensors import CapturedState
