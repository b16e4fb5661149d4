//! An agent's own identity, as far as it is known from outside: for a task that is registered first, each request carries headers
//! with an assertion. How a task is registered, and how an assertion is signed, is for the program that has the identity.

use super::{Credentials, Headers};
use crate::registry::RegistryError;
use hyper::HeaderMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use tokio::sync::OnceCell;
use url::Url;

/// What an identity is asked for. The error is a text for people, without secrets.
pub type AgentFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, String>> + Send + 'a>>;

/// An agent's identity.
pub trait AgentIdentity: fmt::Debug + Send + Sync {
    /// Registers the task that requests are made for, and answers its name. Asked once, before the first request, and again only
    /// after an error.
    fn register_task(&self) -> AgentFuture<'_, String>;

    /// The headers of one request, with an assertion that is made for it. Mark them sensitive.
    fn assertion<'a>(&'a self, task: &'a str, registry: &'a Url) -> AgentFuture<'a, HeaderMap>;
}

/// Credentials of an agent.
#[derive(Debug)]
pub struct OfAgent<A> {
    agent: A,
    task: OnceCell<String>,
}

impl<A: AgentIdentity> OfAgent<A> {
    /// Of this one.
    #[must_use]
    pub fn new(agent: A) -> Self {
        Self { agent, task: OnceCell::new() }
    }
}

impl<A: AgentIdentity> Credentials for OfAgent<A> {
    fn headers<'a>(&'a self, registry: &'a Url) -> Headers<'a> {
        let failed = |of: &str, reason: String| RegistryError::Unusable(format!("{of} with the agent's identity: {reason}"));
        Box::pin(async move {
            let task = self.task.get_or_try_init(|| self.agent.register_task()).await;
            let task = task.map_err(|reason| failed("register a task", reason))?;
            self.agent.assertion(task, registry).await.map_err(|reason| failed("make an assertion", reason))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hyper::header::{AUTHORIZATION, HeaderValue};
    use std::sync::atomic::{AtomicU32, Ordering};

    #[derive(Debug, Default)]
    struct Agent {
        tasks: AtomicU32,
        assertions: AtomicU32,
    }

    impl AgentIdentity for Agent {
        fn register_task(&self) -> AgentFuture<'_, String> {
            Box::pin(async {
                match self.tasks.fetch_add(1, Ordering::Relaxed) {
                    0 => Err("not yet".to_owned()),
                    nth => Ok(format!("task {nth}")),
                }
            })
        }

        fn assertion<'a>(&'a self, task: &'a str, _registry: &'a Url) -> AgentFuture<'a, HeaderMap> {
            Box::pin(async move {
                let nth = self.assertions.fetch_add(1, Ordering::Relaxed);
                let value = HeaderValue::from_str(&format!("assertion {nth} of {task}")).unwrap();
                Ok(HeaderMap::from_iter([(AUTHORIZATION, value)]))
            })
        }
    }

    #[tokio::test]
    async fn a_task_is_registered_once_and_each_request_has_an_assertion_of_its_own() {
        let (agent, url) = (OfAgent::new(Agent::default()), Url::parse("https://registry.example").unwrap());
        let error = agent.headers(&url).await.unwrap_err().to_string();
        assert_eq!(error, "register a task with the agent's identity: not yet");
        for expect in ["assertion 0 of task 1", "assertion 1 of task 1"] {
            assert_eq!(agent.headers(&url).await.unwrap()[AUTHORIZATION], expect);
        }
    }
}
