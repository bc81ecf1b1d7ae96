//! Where the files of a model come from: a directory, a GGUF file, or the hub.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::gguf::{GgufCheckpoint, GgufMetadata};
use super::hub;
use super::safetensors::SafetensorsCheckpoint;
use super::{Checkpoint, TIKTOKEN, is_there, unreadable};
use crate::error::{Error, Result};
use crate::types::TokenId;
use crate::weights::parameters::HeadCounts;

/// The model that `--model` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelSource {
    /// A Hugging Face directory: config.json, tokenizer.json, safetensors.
    Directory(PathBuf),
    GgufFile(PathBuf),
    /// `org/name`, or `org/name@revision` (a branch, tag or commit).
    Hub {
        repo: String,
        revision: String,
    },
}

/// The opened files of a model.
#[derive(Debug)]
pub struct ModelFiles {
    /// The content of `config.json`, or the configuration of a GGUF file in the same form.
    pub config: Value,
    /// The content of `generation_config.json`, if there is one.
    pub generation_config: Option<Value>,
    /// The content of `preprocessor_config.json`, or of `processor_config.json` where that has it, if there is one.
    pub preprocessor_config: Option<Value>,
    pub tokenizer: TokenizerFiles,
    pub checkpoint: Checkpoint,
}

/// The files that the model's tokenizer is made from.
#[derive(Clone, Debug)]
pub enum TokenizerFiles {
    HuggingFace {
        tokenizer_json: PathBuf,
        tokenizer_config_json: Option<PathBuf>,
        /// `chat_template.jinja`, which takes precedence over the template in tokenizer_config.json.
        chat_template: Option<PathBuf>,
    },
    Tiktoken {
        /// `qwen.tiktoken`, which Qwen v1 has instead of `tokenizer.json`.
        ranks: PathBuf,
        tokenizer_config_json: Option<PathBuf>,
        chat_template: Option<PathBuf>,
    },
    /// The metadata of a GGUF file.
    Gguf(Arc<GgufMetadata>),
}

impl TokenizerFiles {
    /// The ids of these tokens among those that were added to the vocabulary of `tokenizer.json`; `None` for each that
    /// is not there, or if there is no such file.
    ///
    /// # Errors
    /// `Config` if the file cannot be read or is not a tokenizer's.
    pub fn added_tokens<const N: usize>(&self, texts: [&str; N]) -> Result<[Option<TokenId>; N]> {
        let Self::HuggingFace { tokenizer_json, .. } = self else { return Ok([None; N]) };
        let AddedTokens { added_tokens } = serde_json::from_value(read_json(tokenizer_json)?)
            .map_err(|e| Error::Config(format!("{}: {e}", tokenizer_json.display())))?;
        Ok(texts.map(|text| added_tokens.iter().find(|token| token.content == text).map(|token| token.id)))
    }
}

/// The part of `tokenizer.json` that has the tokens beside the vocabulary.
#[derive(Deserialize)]
struct AddedTokens {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

#[derive(Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
}

impl ModelSource {
    /// Reads the value of `--model`. It is a path if it exists, starts with `.`, `/` or `~`, or ends in `.gguf`; else
    /// it names a repository of the hub.
    ///
    /// # Errors
    /// `Config` if there is no file at the path, or none that may be looked at, or the value is neither a path nor the
    /// name of a repository.
    pub fn parse(model: &str) -> Result<Self> {
        let path = Path::new(model);
        let is_gguf = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
        let found = match path.metadata() {
            Err(e) if e.kind() == ErrorKind::PermissionDenied => return Err(unreadable(path, &e)),
            found => found.ok(),
        };
        if found.as_ref().is_some_and(Metadata::is_dir) {
            return Ok(Self::Directory(path.to_path_buf()));
        }
        if found.is_some_and(|found| found.is_file()) {
            return if is_gguf {
                Ok(Self::GgufFile(path.to_path_buf()))
            } else {
                Err(Error::Config(format!(
                    "--model {model}: a file must be a .gguf; for safetensors give its directory"
                )))
            };
        }
        if is_gguf || model.starts_with(['.', '/', '~']) {
            return Err(Error::Config(format!("--model {model}: no such file or directory")));
        }
        let (repo, revision) = model.split_once('@').unwrap_or((model, "main"));
        let is_word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
        match repo.split_once('/') {
            Some((org, name)) if is_word(org) && is_word(name) && !revision.is_empty() => {
                Ok(Self::Hub { repo: repo.to_string(), revision: revision.to_string() })
            }
            _ => Err(Error::Config(format!(
                "--model {model}: no such file or directory, and not org/name or org/name@revision of the hub"
            ))),
        }
    }

    /// Opens the files, downloading them first if the source is the hub.
    ///
    /// # Errors
    /// `Config`, naming the file or the repository.
    pub fn open(&self) -> Result<ModelFiles> {
        match self {
            Self::Directory(dir) => open_directory(dir),
            Self::GgufFile(path) => {
                let checkpoint = GgufCheckpoint::open(path)?;
                Ok(ModelFiles {
                    config: checkpoint.config().clone(),
                    generation_config: None,
                    preprocessor_config: None,
                    tokenizer: TokenizerFiles::Gguf(checkpoint.metadata().clone()),
                    checkpoint: Checkpoint::Gguf(checkpoint),
                })
            }
            Self::Hub { repo, revision } => open_directory(&hub::snapshot(repo, revision)?),
        }
    }
}

fn open_directory(dir: &Path) -> Result<ModelFiles> {
    let existing = |file: &str| -> Result<Option<PathBuf>> {
        let path = dir.join(file);
        Ok(is_there(&path)?.then_some(path))
    };
    let required = |file: &str| {
        existing(file)?.ok_or_else(|| {
            Error::Config(format!("{} has no {file}; it is not a whole Hugging Face model directory", dir.display()))
        })
    };
    if let (None, Some(adapter)) = (existing("config.json")?, existing("adapter_config.json")?) {
        return Err(is_adapter(dir, &read_json(&adapter)?));
    }
    let preprocessor = match existing("preprocessor_config.json")? {
        Some(path) => Some(path),
        None => existing("processor_config.json")?,
    };
    let config = read_json(&required("config.json")?)?;
    let (tokenizer_config_json, chat_template) = (existing("tokenizer_config.json")?, existing("chat_template.jinja")?);
    let tokenizer = match (existing("tokenizer.json")?, existing(TIKTOKEN)?) {
        (None, Some(ranks)) => TokenizerFiles::Tiktoken { ranks, tokenizer_config_json, chat_template },
        _ => TokenizerFiles::HuggingFace {
            tokenizer_json: required("tokenizer.json")?,
            tokenizer_config_json,
            chat_template,
        },
    };
    let counts = head_counts(&config);
    Ok(ModelFiles {
        preprocessor_config: preprocessor.map(|path| read_json(&path)).transpose()?,
        config,
        generation_config: existing("generation_config.json")?.map(|path| read_json(&path)).transpose()?,
        tokenizer,
        checkpoint: Checkpoint::Safetensors(SafetensorsCheckpoint::open(dir)?.of_parameters(counts)?),
    })
}

/// The numbers of heads in `config.json`; 0 where it has none, so that no fused tensor is divided by them.
fn head_counts(config: &Value) -> HeadCounts {
    let count = |name: &str| config[name].as_u64().map(|count| count as usize);
    let heads = count("num_attention_heads").unwrap_or(0);
    HeadCounts { heads, kv_heads: count("num_key_value_heads").unwrap_or(heads) }
}

/// The error for the directory of an adapter, with this `adapter_config.json`.
fn is_adapter(dir: &Path, config: &Value) -> Error {
    let (dir, base) = (dir.display(), config["base_model_name_or_path"].as_str().unwrap_or("its base model"));
    Error::Config(format!(
        "--model {dir}: is a LoRA adapter; serve {base} and push the adapter: `rollout push-lora {dir}` merges it, and \
         with --max-adapters it can stay unmerged"
    ))
}

fn read_json(path: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|e| unreadable(path, &e))?;
    serde_json::from_str(&text).map_err(|e| Error::Config(format!("{}: not JSON: {e}", path.display())))
}
