//! The value of `--lora-modules`: an adapter to load at the start.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::Deserialize;

/// An adapter that is resident from the start.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct LoraModule {
    /// The `model` of requests that use it.
    pub name: String,
    /// The directory with `adapter_config.json` and `adapter_model.safetensors`.
    pub path: PathBuf,
}

impl FromStr for LoraModule {
    type Err = String;

    /// Reads `NAME=DIRECTORY`, or vLLM's object `{"name": …, "path": …}`.
    fn from_str(text: &str) -> Result<Self, String> {
        let module = match text.split_once('=') {
            _ if text.starts_with('{') => serde_json::from_str(text).map_err(|e| e.to_string())?,
            Some((name, path)) => Self { name: name.into(), path: path.into() },
            None => return Err("is not NAME=DIRECTORY".into()),
        };
        if module.name.is_empty() || module.path == Path::new("") {
            return Err("has an empty name or path".into());
        }
        Ok(module)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_is_a_name_with_a_directory_or_an_object() {
        let module = LoraModule { name: "sql".into(), path: "/adapters/a=b".into() };
        assert_eq!("sql=/adapters/a=b".parse(), Ok(module.clone()));
        let object = r#"{"name": "sql", "path": "/adapters/a=b", "base_model_name": "base"}"#;
        assert_eq!(object.parse(), Ok(module));
        for wrong in ["sql", "=/adapters", "sql=", "{\"name\": \"sql\"}"] {
            assert!(LoraModule::from_str(wrong).is_err(), "{wrong}");
        }
    }
}
