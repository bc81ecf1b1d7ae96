use super::*;

#[test]
fn every_fixture_opens_with_all_its_files() {
    for name in ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "smollm3", "phi3"] {
        let files = ModelSource::parse(fixture(name).to_str().unwrap()).unwrap().open().unwrap();
        assert_eq!(files.config["vocab_size"], 512, "{name}");
        assert!(files.generation_config.is_some(), "{name}");
        assert!(files.checkpoint.has("model.embed_tokens.weight"), "{name}");
        let TokenizerFiles::HuggingFace { tokenizer_json, tokenizer_config_json, chat_template } = files.tokenizer
        else {
            panic!("{name} is no GGUF file");
        };
        assert!(tokenizer_json.exists() && tokenizer_config_json.unwrap().exists(), "{name}");
        assert_eq!(chat_template.is_some(), fixture(name).join("chat_template.jinja").exists(), "{name}");
    }
    let files = ModelSource::parse(fixture("qwen_v1").to_str().unwrap()).unwrap().open().unwrap();
    assert!(files.checkpoint.has("model.layers.1.self_attn.v_proj.bias"), "{:?}", files.checkpoint.names());
    let TokenizerFiles::Tiktoken { ranks, tokenizer_config_json, chat_template } = files.tokenizer else {
        panic!("Qwen v1 has no tokenizer.json")
    };
    assert!(ranks.ends_with("qwen.tiktoken") && tokenizer_config_json.unwrap().exists() && chat_template.is_none());
    let files = ModelSource::parse(fixture("llama-tied.gguf").to_str().unwrap()).unwrap().open().unwrap();
    let TokenizerFiles::Gguf(metadata) = files.tokenizer else { panic!("a GGUF file has its tokenizer inside") };
    assert_eq!(metadata["tokenizer.ggml.tokens"].to_vec().unwrap().len(), 512);
}

#[test]
fn an_adapter_given_as_a_model_is_called_one() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"base_model_name_or_path": "org/base"}"#).unwrap();
    let error = ModelSource::Directory(dir.path().into()).open().unwrap_err().to_string();
    assert!(error.contains("is a LoRA adapter; serve org/base and push the adapter"), "{error}");
}

#[test]
fn names_are_told_from_paths() {
    let hub = |repo: &str, revision: &str| ModelSource::Hub { repo: repo.into(), revision: revision.into() };
    assert_eq!(ModelSource::parse("Qwen/Qwen2.5-0.5B").unwrap(), hub("Qwen/Qwen2.5-0.5B", "main"));
    assert_eq!(ModelSource::parse("org/name@refs/pr/1").unwrap(), hub("org/name", "refs/pr/1"));
    for path in ["./none", "/no/such/model", "~/model", "none.gguf", "org/none.GGUF", "../none"] {
        let message = config_error(ModelSource::parse(path));
        assert_eq!(message, format!("--model {path}: no such file or directory"));
    }
    for nothing in ["", "model", "a/b/c", "org/", "/@main", "org/name@", "org/na me"] {
        let message = config_error(ModelSource::parse(nothing));
        assert!(message.contains("no such file or directory"), "{message}");
    }
    let file = fixture("llama/model.safetensors");
    assert!(config_error(ModelSource::parse(file.to_str().unwrap())).contains("give its directory"));
}

#[test]
fn incomplete_directories_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let source = ModelSource::Directory(temp.path().to_path_buf());
    assert!(config_error(source.open()).contains("has no config.json"));
    std::fs::write(temp.path().join("config.json"), "{").unwrap();
    assert!(config_error(source.open()).contains("config.json: not JSON"));
    std::fs::write(temp.path().join("config.json"), "{}").unwrap();
    assert!(config_error(source.open()).contains("has no tokenizer.json"));
    std::fs::write(temp.path().join("tokenizer.json"), "{}").unwrap();
    assert!(config_error(source.open()).contains("has neither model.safetensors"));
    for pickled in ["pytorch_model.bin", "pytorch_model.bin.index.json"] {
        std::fs::write(temp.path().join(pickled), "").unwrap();
        let error = config_error(source.open());
        assert!(error.contains("in pytorch_model*.bin only") && error.contains("python3 -c '"), "{error}");
        std::fs::remove_file(temp.path().join(pickled)).unwrap();
    }
}

#[test]
fn a_link_to_nowhere_is_told_from_no_file() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("config.json");
    assert!(!is_there(&path).unwrap());
    std::os::unix::fs::symlink("../../blobs/1f", &path).unwrap();
    let message = config_error(ModelSource::Directory(temp.path().to_path_buf()).open());
    assert!(message.starts_with(&format!("{} is a link to ../../blobs/1f, which is not there", path.display())));
}

/// Of the error alone, because root, as whom tests may run, reads everything.
#[test]
fn a_file_of_others_is_refused_with_the_user_that_reads() {
    let message = unreadable(Path::new("/models/x"), &ErrorKind::PermissionDenied.into()).to_string();
    assert!(message.starts_with("cannot read /models/x: permission denied; let user "), "{message}");
}
