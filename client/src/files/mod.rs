//! Files.

mod reader;
mod writer;

pub use reader::FileReader;
pub use writer::FileWriter;

use crate::client::{decode, operation_id};
use crate::pending::Again;
use crate::recovery::Reply;
use crate::task::Litter;
use crate::{ClientStatus, ExecServerClient, ExecServerError};
use portcullis_protocol::base64::Chunk;
use portcullis_protocol::fs::{
    CanonicalizeResult, CopyParams, CreateDirectoryParams, DirectoryEntryResult, Empty, HandleParams, MetadataResult, OpenParams,
    PathParams, PlainPathParams, ReadDirectoryResult, ReadFileResult, RemoveParams, WalkOptions, WalkParams, WalkResult,
};
use portcullis_protocol::helper::OpenMode;
use portcullis_protocol::path::WirePath;
use portcullis_protocol::rpc::code;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// A sandbox object, or none for what the server gives to requests without one.
type Sandbox<'a> = Option<&'a RawValue>;

/// Parameters of `fs/writeFile`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct WriteFile<'a> {
    path: &'a WirePath,
    data_base64: Chunk,
    #[serde(skip_serializing_if = "Option::is_none")]
    operation_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Sandbox<'a>,
}

fn owned(sandbox: Sandbox<'_>) -> Option<Box<RawValue>> {
    sandbox.map(ToOwned::to_owned)
}

impl ExecServerClient {
    /// A file's content; at most 512 MiB.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn read_file(&self, path: &WirePath, sandbox: Sandbox<'_>) -> Result<Vec<u8>, ExecServerError> {
        let params = PathParams { path: path.clone(), follow_symlinks: None, sandbox: owned(sandbox) };
        let reply = self.ask("fs/readFile", &params, Again::Fail).await?;
        match reply.body {
            Some(content) => Ok(content.into()),
            None => decode("fs/readFile", reply).map(|read: ReadFileResult| read.data_base64.0),
        }
    }

    /// Writes a file, which is made if it is not there.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn write_file(&self, path: &WirePath, content: Vec<u8>, sandbox: Sandbox<'_>) -> Result<(), ExecServerError> {
        let operation_id = self.change_id();
        let again = again(operation_id.as_ref());
        let params = WriteFile { path, data_base64: Chunk(content), operation_id, sandbox };
        self.call_again("fs/writeFile", &params, again).await.map(|_: Empty| ())
    }

    /// Makes a directory, with its parents if `recursive`; then one that is there is no error.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn create_directory(&self, path: &WirePath, recursive: bool, sandbox: Sandbox<'_>) -> Result<(), ExecServerError> {
        let operation_id = self.change_id();
        let again = again(operation_id.as_ref());
        let (path, sandbox) = (path.clone(), owned(sandbox));
        let params = CreateDirectoryParams { path, recursive: Some(recursive), follow_symlinks: None, operation_id, sandbox };
        self.call_again("fs/createDirectory", &params, again).await.map(|_: Empty| ())
    }

    /// Removes a file, or a directory with what is in it if `recursive`. What is missing is an error unless `force`.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn remove(
        &self,
        path: &WirePath,
        recursive: bool,
        force: bool,
        sandbox: Sandbox<'_>,
    ) -> Result<(), ExecServerError> {
        let operation_id = self.change_id();
        let again = again(operation_id.as_ref());
        let (path, recursive, force) = (path.clone(), Some(recursive), Some(force));
        let params = RemoveParams { path, recursive, force, follow_symlinks: None, operation_id, sandbox: owned(sandbox) };
        self.call_again("fs/remove", &params, again).await.map(|_: Empty| ())
    }

    /// Copies a file or a link, or a directory with what is in it if `recursive`.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn copy(
        &self,
        from: &WirePath,
        to: &WirePath,
        recursive: bool,
        sandbox: Sandbox<'_>,
    ) -> Result<(), ExecServerError> {
        let operation_id = self.change_id();
        let again = again(operation_id.as_ref());
        let (source_path, destination_path) = (from.clone(), to.clone());
        let params = CopyParams { source_path, destination_path, recursive, operation_id, sandbox: owned(sandbox) };
        self.call_again("fs/copy", &params, again).await.map(|_: Empty| ())
    }

    /// What is at a path.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn metadata(&self, path: &WirePath, sandbox: Sandbox<'_>) -> Result<MetadataResult, ExecServerError> {
        let params = PathParams { path: path.clone(), follow_symlinks: None, sandbox: owned(sandbox) };
        self.call("fs/getMetadata", &params).await
    }

    /// A path without links; it must exist.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn canonicalize(&self, path: &WirePath, sandbox: Sandbox<'_>) -> Result<WirePath, ExecServerError> {
        let params = PlainPathParams { path: path.clone(), sandbox: owned(sandbox) };
        self.call("fs/canonicalize", &params).await.map(|result: CanonicalizeResult| result.path)
    }

    /// The names in a directory.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn read_directory(
        &self,
        path: &WirePath,
        sandbox: Sandbox<'_>,
    ) -> Result<Vec<DirectoryEntryResult>, ExecServerError> {
        let params = PlainPathParams { path: path.clone(), sandbox: owned(sandbox) };
        self.call("fs/readDirectory", &params).await.map(|result: ReadDirectoryResult| result.entries)
    }

    /// What is below a directory.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn walk(&self, path: &WirePath, options: WalkOptions, sandbox: Sandbox<'_>) -> Result<WalkResult, ExecServerError> {
        let params = WalkParams { path: path.clone(), options, sandbox: owned(sandbox) };
        self.call("fs/walk", &params).await
    }

    /// Opens a file for reading, block by block.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn open(&self, path: &WirePath, sandbox: Sandbox<'_>) -> Result<FileReader, ExecServerError> {
        Ok(FileReader::new(Handle::open(self, path, OpenMode::Read, sandbox).await?))
    }

    /// Opens a file for writing, block by block: it is made, or emptied at once.
    ///
    /// # Errors
    /// See [`ExecServerError`].
    pub async fn create(&self, path: &WirePath, sandbox: Sandbox<'_>) -> Result<FileWriter, ExecServerError> {
        Ok(FileWriter::new(Handle::open(self, path, OpenMode::Replace, sandbox).await?))
    }

    /// A name for a change, if the server knows changes by names.
    fn change_id(&self) -> Option<String> {
        self.extensions().file_operation_id.then(operation_id).flatten()
    }
}

fn again(operation_id: Option<&String>) -> Again {
    if operation_id.is_some() { Again::Send } else { Again::Lost }
}

/// An open file. Dropped, it is closed in the background.
#[derive(Debug)]
struct Handle {
    client: ExecServerClient,
    id: String,
    path: WirePath,
    /// The link that opened it, if it cannot outlive that.
    generation: Option<u64>,
    is_closed: bool,
}

impl Handle {
    async fn open(
        client: &ExecServerClient,
        path: &WirePath,
        mode: OpenMode,
        sandbox: Sandbox<'_>,
    ) -> Result<Self, ExecServerError> {
        let id = operation_id().ok_or_else(|| ExecServerError::Parameters {
            method: "fs/open".to_owned(),
            reason: "the system has no random bits to name a handle with".to_owned(),
        })?;
        let params = OpenParams { handle_id: id.clone(), path: path.clone(), mode, sandbox: owned(sandbox) };
        // Made before the call: if this future is dropped, or the answer lost, the handle may be there all the same.
        let mut handle = Self { client: client.clone(), id, path: path.clone(), generation: None, is_closed: false };
        let again = if mode == OpenMode::Read { Again::Fail } else { Again::Lost };
        let opened: Result<HandleParams, _> = client.call_again("fs/open", &params, again).await;
        if let Err(ExecServerError::Server(_)) = &opened {
            handle.is_closed = true;
        }
        opened?;
        if !client.keeps_handles() {
            handle.generation = handle.present();
        }
        Ok(handle)
    }

    fn present(&self) -> Option<u64> {
        match self.client.status() {
            ClientStatus::Connected { generation } => Some(generation),
            ClientStatus::Recovering | ClientStatus::Failed(_) => None,
        }
    }

    /// Calls something of the handle, whose blocks may be sent again.
    async fn call<R: DeserializeOwned>(&self, method: &str, params: &impl Serialize) -> Result<R, ExecServerError> {
        decode(method, self.ask(method, params).await?)
    }

    /// The same, with what the result brings as bytes if it does.
    async fn ask(&self, method: &str, params: &impl Serialize) -> Result<Reply, ExecServerError> {
        let again = match (self.client.keeps_handles(), method) {
            // The block has its offset: twice is once.
            (true, _) => Again::Send,
            (false, "fs/readBlock") => Again::Fail,
            (false, _) => Again::Lost,
        };
        let is_old = !self.client.keeps_handles() && (self.generation.is_none() || self.generation != self.present());
        if is_old && !matches!(self.client.status(), ClientStatus::Failed(_)) {
            return Err(self.lost());
        }
        match self.client.ask(method, params, again).await {
            // The link was cut while the call was in line.
            Err(ExecServerError::Server(error)) if error.code == code::NOT_FOUND && self.generation != self.present() => {
                Err(self.lost())
            }
            other => other,
        }
    }

    fn lost(&self) -> ExecServerError {
        let path = match &self.path {
            WirePath::Local(path) => path.to_string(),
            other => format!("{other:?}"),
        };
        ExecServerError::HandleLost { path }
    }

    /// Closes it and waits for that.
    async fn close(mut self) -> Result<(), ExecServerError> {
        self.is_closed = true;
        let params = HandleParams { handle_id: self.id.clone() };
        self.client.call("fs/close", &params).await.map(|_: Empty| ())
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if !self.is_closed {
            self.client.drop_later(Litter::Handle(std::mem::take(&mut self.id)));
        }
    }
}
