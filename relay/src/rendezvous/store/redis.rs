//! The store of many nodes: a Redis that all of them ask. Each question is one script, which Redis runs alone, so no two nodes give
//! one environment to two owners.

use super::{ENVIRONMENTS, Environment, LEASE, Lease, Refused, SHARE};
use crate::keys::PublicKeys;
use crate::rendezvous::signed::{self, Signer};
use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::io::tcp::TcpSettings;
use redis::{Client, IntoConnectionInfo as _};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::timeout;

/// How long one question may take, a new connection included: callers wait for it.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a connection may be dead before the system says so.
const DEAD: Duration = Duration::from_secs(5);
/// Questions at a time on the one connection.
const QUESTIONS: usize = 1024;

/// The key: the first node's proposal stays.
const KEY: &str = "redis.call('SET', KEYS[1], ARGV[1], 'NX') return {'ok', redis.call('GET', KEYS[1])}";

/// Milliseconds since 1970 by the clock of Redis, since those of nodes differ; for scripts.
const NOW: &str = "local time = redis.call('TIME') local now = time[1] * 1000 + math.floor(time[2] / 1000) ";

/// The names of environments by the time at which they were last registered, leased or renewed are in the first key, and those of one
/// owner in a key of its own, which is made from the second argument; for scripts.
const OWN: &str = "local own = 'portcullis:owner:' .. ARGV[2] ";

const REGISTER: &str = "
local owner, registration, keys = unpack(redis.call('HMGET', KEYS[2], 'owner', 'registration', 'keys'))
if owner and owner ~= ARGV[2] then return {'taken'} end
if not owner and (redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[5]) or redis.call('ZCARD', own) >= tonumber(ARGV[8])) then
  local oldest
  for _, name in ipairs(redis.call('ZRANGE', own, 0, -1)) do
    if redis.call('EXISTS', ARGV[7] .. name) == 0 then oldest = name break end
  end
  if not oldest then return {'full'} end
  redis.call('DEL', ARGV[6] .. oldest)
  redis.call('ZREM', KEYS[1], oldest)
  redis.call('ZREM', own, oldest)
end
if keys ~= ARGV[3] then
  registration = ARGV[4]
  redis.call('DEL', KEYS[3])
end
redis.call('HSET', KEYS[2], 'owner', ARGV[2], 'registration', registration, 'keys', ARGV[3])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZADD', own, now, ARGV[1])
return {'ok', registration}";

const FIND: &str = "
local owner, registration, keys = unpack(redis.call('HMGET', KEYS[2], 'owner', 'registration', 'keys'))
if not owner then return {'unknown'} end
return {'ok', owner, registration, keys, redis.call('GET', KEYS[3]) or ''}";

const LEASE_OUT: &str = "
local owner, registration, keys = unpack(redis.call('HMGET', KEYS[2], 'owner', 'registration', 'keys'))
if not owner then return {'unknown'} end
if owner ~= ARGV[2] or registration ~= ARGV[3] then return {'stale'} end
local generation = redis.call('HINCRBY', KEYS[2], 'generation', 1)
redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[5])
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZADD', own, now, ARGV[1])
return {'ok', tostring(generation), keys}";

/// A Redis that lost its contents learns the environment again from whoever serves it.
const RENEW: &str = "
local owner, registration, generation = unpack(redis.call('HMGET', KEYS[2], 'owner', 'registration', 'generation'))
if owner and (owner ~= ARGV[2] or registration ~= ARGV[3]) then return {'stale'} end
if tonumber(generation or 0) > tonumber(ARGV[6]) then return {'stale'} end
if not owner and (redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[8]) or redis.call('ZCARD', own) >= tonumber(ARGV[9])) then
  return {'stale'}
end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZADD', own, now, ARGV[1])
redis.call('HSET', KEYS[2], 'owner', ARGV[2], 'registration', ARGV[3], 'keys', ARGV[7], 'generation', ARGV[6])
redis.call('SET', KEYS[3], ARGV[4], 'PX', ARGV[5])
return {'ok'}";

const RELEASE: &str = "
if redis.call('HGET', KEYS[2], 'generation') == ARGV[2] then redis.call('DEL', KEYS[3]) end
return {'ok'}";

/// The way to Redis.
#[derive(Clone)]
pub(in crate::rendezvous) struct Redis {
    connection: ConnectionManager,
    /// What is proposed as the key if there is none yet.
    proposal: Arc<str>,
    /// Whether the last question had no answer, so that an outage is told once.
    is_lost: Arc<AtomicBool>,
}

impl fmt::Debug for Redis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Redis(..)")
    }
}

impl Redis {
    /// The store at a URL, `redis://[USER:PASSWORD@]HOST[:PORT][/NUMBER]` or `redis+unix:///PATH`. It is not reached before it is
    /// asked.
    ///
    /// # Errors
    /// The URL is none. The text does not have it, since it may hold a password.
    pub(in crate::rendezvous) fn new(url: &str) -> io::Result<Self> {
        let wrong = |error: redis::RedisError| io::Error::other(format!("--store: {error}; give redis://HOST:PORT"));
        let info = url.into_connection_info().map_err(wrong)?;
        let info = info.set_tcp_settings(TcpSettings::default().set_nodelay(true).set_user_timeout(DEAD));
        let config = ConnectionManagerConfig::new()
            .set_number_of_retries(0)
            .set_connection_timeout(Some(ANSWER))
            .set_response_timeout(Some(ANSWER))
            .set_concurrency_limit(QUESTIONS);
        let client = Client::open(info).map_err(wrong)?;
        let connection = ConnectionManager::new_lazy_with_config(client, config).map_err(wrong)?;
        let proposal = signed::random().ok_or_else(|| io::Error::other("make a key: the system gave no random bytes"))?;
        Ok(Self { connection, proposal: proposal.into(), is_lost: Arc::default() })
    }

    pub(super) async fn signer(&self) -> Result<Signer, Refused> {
        let mut command = redis::cmd("EVAL");
        command.arg(KEY).arg(1).arg("portcullis:key").arg(&*self.proposal);
        let [key] = self.words(&command).await?;
        Ok(Signer::new(&key))
    }

    pub(super) async fn register(&self, owner: u64, environment: &str, keys: &PublicKeys) -> Result<String, Refused> {
        let new = uuid::Uuid::new_v4().to_string();
        let mut command = script(&format!("{NOW}{OWN}{REGISTER}"), environment);
        command.arg(hex(owner)).arg(json(keys)?).arg(new).arg(ENVIRONMENTS).arg(ENVIRONMENT).arg(EXECUTOR).arg(SHARE);
        let [registration] = self.words(&command).await?;
        Ok(registration)
    }

    pub(super) async fn find(&self, environment: &str) -> Result<Environment, Refused> {
        let [owner, registration, keys, node] = self.words(&script(FIND, environment)).await?;
        let owner = u64::from_str_radix(&owner, 16).map_err(|_| Refused::Unreachable)?;
        let node = Some(node).filter(|node| !node.is_empty());
        Ok(Environment { owner, registration, keys: of_json(&keys)?, node })
    }

    pub(super) async fn lease(&self, owner: u64, environment: &str, registration: &str, node: &str) -> Result<Lease, Refused> {
        let mut command = script(&format!("{NOW}{OWN}{LEASE_OUT}"), environment);
        command.arg(hex(owner)).arg(registration).arg(node).arg(milliseconds(LEASE));
        let [generation, keys] = self.words(&command).await?;
        let generation = generation.parse().map_err(|_| Refused::Unreachable)?;
        let [environment, registration, node] = [environment, registration, node].map(str::to_owned);
        Ok(Lease { environment, owner, registration, keys: of_json(&keys)?, node, generation })
    }

    pub(super) async fn renew(&self, lease: &Lease) -> Result<(), Refused> {
        let mut command = script(&format!("{NOW}{OWN}{RENEW}"), &lease.environment);
        command.arg(hex(lease.owner)).arg(&lease.registration).arg(&lease.node).arg(milliseconds(LEASE));
        command.arg(lease.generation).arg(json(&lease.keys)?).arg(ENVIRONMENTS).arg(SHARE);
        let [] = self.words(&command).await?;
        Ok(())
    }

    pub(super) async fn release(&self, lease: &Lease) {
        let mut command = script(RELEASE, &lease.environment);
        command.arg(lease.generation);
        let _runs_out = self.words::<0>(&command).await;
    }

    /// Asks, and takes the answer apart: what became of it, and so many words.
    async fn words<const N: usize>(&self, command: &redis::Cmd) -> Result<[String; N], Refused> {
        let mut connection = self.connection.clone();
        let answer = timeout(ANSWER, command.query_async::<Vec<String>>(&mut connection)).await;
        let lost = |reason: &dyn fmt::Display| {
            if !self.is_lost.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "the store gives no answer: {reason}; sockets that are open go on, and nothing new is let in until it does"
                );
            }
            Refused::Unreachable
        };
        let words = answer.map_err(|late| lost(&late))?.map_err(|error| lost(&error))?;
        if self.is_lost.swap(false, Ordering::Relaxed) {
            tracing::warn!("the store answers again");
        }
        let mut words = words.into_iter();
        match words.next().as_deref() {
            Some("ok") => {
                words.collect::<Vec<_>>().try_into().map_err(|_| lost(&"another number of words came than was asked for"))
            }
            Some("taken") => Err(Refused::Taken),
            Some("unknown") => Err(Refused::Unknown),
            Some("stale") => Err(Refused::Stale),
            Some("full") => Err(Refused::Full),
            _ => Err(lost(&"what it answered is no answer")),
        }
    }
}

/// A script about one environment, with its keys and its name.
fn script(text: &str, environment: &str) -> redis::Cmd {
    let mut command = redis::cmd("EVAL");
    let keys = ["portcullis:environments".to_owned(), format!("{ENVIRONMENT}{environment}"), format!("{EXECUTOR}{environment}")];
    command.arg(text).arg(keys.len()).arg(&keys[..]).arg(environment);
    command
}

/// Names in Redis begin so, since it may hold other things.
const ENVIRONMENT: &str = "portcullis:environment:";
const EXECUTOR: &str = "portcullis:executor:";

fn hex(owner: u64) -> String {
    format!("{owner:016x}")
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// What is stored of keys: the same keys are the same text.
fn json(keys: &PublicKeys) -> Result<String, Refused> {
    serde_json::to_string(keys).map_err(|_| Refused::Unreachable)
}

fn of_json(text: &str) -> Result<PublicKeys, Refused> {
    serde_json::from_str(text).map_err(|_| Refused::Unreachable)
}
