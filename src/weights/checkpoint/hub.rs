//! Downloads model files from the Hugging Face hub into its cache on disk.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::{TIKTOKEN, safetensors};
use crate::error::{Error, Result};

/// Time limit for the hub's first answer. Where packets vanish, the client itself would wait for minutes.
const FIRST_ANSWER: Duration = Duration::from_secs(15);

/// The files beside the safetensors that are fetched, where the repository has them.
const SMALL_FILES: [&str; 7] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    TIKTOKEN,
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
];

/// The directory with the files of `repo` at `revision`, which are downloaded if need be. If the hub cannot be reached,
/// what the cache has of the revision is taken, if it is whole.
///
/// # Errors
/// `Config`: the hub cannot be reached, has no such model, or a download broke off.
pub(super) fn snapshot(repo: &str, revision: &str) -> Result<PathBuf> {
    snapshot_by(ApiBuilder::from_env(), &Cache::from_env(), repo, revision)
}

/// [`snapshot`] with a client of the hub, and the cache that it downloads into.
fn snapshot_by(api: ApiBuilder, cache: &Cache, repo: &str, revision: &str) -> Result<PathBuf> {
    let api = api.with_retries(0).build().map_err(|e| unreachable(repo, &e.to_string()))?;
    let named = Repo::with_revision(repo.to_string(), RepoType::Model, revision.to_string());
    let info = match repo_info(&api, &named) {
        Ok(info) => info,
        Err(e) => return cached_snapshot(cache, named).ok_or_else(|| unreachable(repo, &e)),
    };
    let listing: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    if safetensors::is_pickled(|file| listing.contains(&file)) {
        return Err(Error::Config(format!(
            "{repo} has its weights in pytorch_model*.bin only, which are not supported; download it (`hf download \
             {repo} --local-dir DIRECTORY`), and start with --model DIRECTORY, which gives the command that converts \
             them"
        )));
    }
    // All files are asked for by commit, so that a push to the branch between two downloads cannot mix two models.
    let commit = Repo::with_revision(repo.to_string(), RepoType::Model, info.sha.clone());
    let dir = cache.repo(commit.clone()).pointer_path(&info.sha);
    let api = api.repo(commit);
    for file in wanted(listing.into_iter()) {
        if !dir.join(file).exists() {
            api.download(file).map_err(|e| {
                Error::Config(format!("downloading {file} of {repo} broke off ({e}); start again to resume it"))
            })?;
        }
    }
    Ok(dir)
}

/// The files of a repository's listing that serving needs. If there is a whole `model.safetensors`, shards are left
/// out.
fn wanted<'a>(listing: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let files: Vec<&str> = listing.collect();
    let single = files.contains(&safetensors::SINGLE);
    let is_weight = |file: &str| {
        let sharded = file == safetensors::INDEX || (file.starts_with("model-") && file.ends_with(".safetensors"));
        if single { file == safetensors::SINGLE } else { sharded }
    };
    files.into_iter().filter(|file| SMALL_FILES.contains(file) || is_weight(file)).collect()
}

/// The repository's listing. Waits for at most [`FIRST_ANSWER`]; the error says why there is none.
fn repo_info(api: &Api, repo: &Repo) -> std::result::Result<RepoInfo, String> {
    let (sender, receiver) = mpsc::channel();
    let repo = api.repo(repo.clone());
    // The thread may outlive this call by the client's own time limit; it holds nothing but its connection.
    std::thread::spawn(move || {
        let answer = repo.info().map_err(|e: ApiError| e.to_string());
        // Nobody receives the answer after the time limit.
        let _ = sender.send(answer);
    });
    receiver.recv_timeout(FIRST_ANSWER).unwrap_or_else(|_| Err(format!("no answer in {} s", FIRST_ANSWER.as_secs())))
}

/// The directory of the cache with the files of `repo`, if they are whole.
fn cached_snapshot(cache: &Cache, repo: Repo) -> Option<PathBuf> {
    let config = cache.repo(repo).get("config.json")?;
    let dir: &Path = config.parent()?;
    safetensors::SafetensorsCheckpoint::open(dir).ok()?;
    ["tokenizer.json", TIKTOKEN].into_iter().any(|file| dir.join(file).exists()).then(|| dir.to_path_buf())
}

fn unreachable(repo: &str, why: &str) -> Error {
    Error::Config(format!(
        "cannot reach the hub for {repo}: {why}; check the name (a private model needs a token), or download the model \
         and pass its directory"
    ))
}

#[cfg(test)]
mod tests;
