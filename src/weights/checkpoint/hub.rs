//! Model files from the Hugging Face hub, through its cache on disk.

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};

use super::safetensors;
use crate::error::{Error, Result};

/// For the first answer. The client itself waits for minutes where packets vanish.
const FIRST_ANSWER: Duration = Duration::from_secs(15);

/// Files to fetch where the repository has them; safetensors come on top.
const SMALL_FILES: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// The directory with the files of `repo` at `revision`, downloaded if need be. Without the hub, what the cache has of
/// that revision is taken if it is whole.
///
/// # Errors
/// `Config`: the hub cannot be reached, has no such model, or a download broke off.
pub(super) fn snapshot(repo: &str, revision: &str) -> Result<PathBuf> {
    snapshot_by(ApiBuilder::from_env(), &Cache::from_env(), repo, revision)
}

/// [`snapshot`] with a client and the cache it downloads into.
fn snapshot_by(api: ApiBuilder, cache: &Cache, repo: &str, revision: &str) -> Result<PathBuf> {
    let api = api.with_retries(0).build().map_err(|e| unreachable(repo, &e.to_string()))?;
    let named = Repo::with_revision(repo.to_string(), RepoType::Model, revision.to_string());
    let info = match repo_info(&api, &named) {
        Ok(info) => info,
        Err(e) => return cached_snapshot(cache, named).ok_or_else(|| unreachable(repo, &e)),
    };
    // All files by commit, so that a push to the branch between two downloads cannot mix two models.
    let commit = Repo::with_revision(repo.to_string(), RepoType::Model, info.sha.clone());
    let dir = cache.repo(commit.clone()).pointer_path(&info.sha);
    let api = api.repo(commit);
    for file in wanted(info.siblings.iter().map(|s| s.rfilename.as_str())) {
        if !dir.join(file).exists() {
            api.download(file).map_err(|e| {
                Error::Config(format!("downloading {file} of {repo} broke off ({e}); start again to resume it"))
            })?;
        }
    }
    Ok(dir)
}

/// The files of a listing that serving needs. If there is one whole `model.safetensors`, shards are not taken.
fn wanted<'a>(listing: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let files: Vec<&str> = listing.collect();
    let single = files.contains(&safetensors::SINGLE);
    let is_weight = |file: &str| {
        let sharded = file == safetensors::INDEX || (file.starts_with("model-") && file.ends_with(".safetensors"));
        if single { file == safetensors::SINGLE } else { sharded }
    };
    files.into_iter().filter(|file| SMALL_FILES.contains(file) || is_weight(file)).collect()
}

/// The repository's listing, or why there is none, within [`FIRST_ANSWER`].
fn repo_info(api: &Api, repo: &Repo) -> std::result::Result<RepoInfo, String> {
    let (sender, receiver) = mpsc::channel();
    let repo = api.repo(repo.clone());
    // The thread may outlive this call by the client's own time limit; it holds nothing but its connection.
    std::thread::spawn(move || {
        let answer = repo.info().map_err(|e: ApiError| e.to_string());
        // Nobody listens after the time limit.
        let _ = sender.send(answer);
    });
    receiver.recv_timeout(FIRST_ANSWER).unwrap_or_else(|_| Err(format!("no answer in {} s", FIRST_ANSWER.as_secs())))
}

fn cached_snapshot(cache: &Cache, repo: Repo) -> Option<PathBuf> {
    let config = cache.repo(repo).get("config.json")?;
    let dir: &Path = config.parent()?;
    safetensors::SafetensorsCheckpoint::open(dir).ok()?;
    dir.join("tokenizer.json").exists().then(|| dir.to_path_buf())
}

fn unreachable(repo: &str, why: &str) -> Error {
    Error::Config(format!(
        "cannot reach the hub for {repo}: {why}; check the name (a private model needs a token), or download the model \
         and pass its directory"
    ))
}

#[cfg(test)]
mod tests;
