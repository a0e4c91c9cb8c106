-- The whole schema of Tidings, for reading and for applying by hand; `tidings migrate` makes the same. Every table is InnoDB,
-- every time is UTC by the database's clock, ids and names compare byte by byte (utf8mb4_bin).

-- Which migrations have been applied (kept by the migration library, pressly/goose).
CREATE TABLE IF NOT EXISTS t_schema_version (
  id         BIGINT UNSIGNED NOT NULL AUTO_INCREMENT,
  version_id BIGINT          NOT NULL,
  is_applied TINYINT(1)      NOT NULL,
  tstamp     DATETIME        DEFAULT CURRENT_TIMESTAMP,
  PRIMARY KEY (id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin;
INSERT INTO t_schema_version (version_id, is_applied) SELECT v, 1 FROM (SELECT 0 AS v UNION ALL SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT 3 UNION ALL SELECT 4 UNION ALL SELECT 5 UNION ALL SELECT 6 UNION ALL SELECT 7) AS versions
  WHERE NOT EXISTS (SELECT 1 FROM t_schema_version AS old WHERE old.version_id = versions.v);

-- The queue: one table a lane, its rows the tasks still to be sent. A claim sets status 1, owner and the lease's end; the end
-- of a task moves its row to t_msg_record or t_msg_dead in one transaction. Rows with msg_id 0 and the year 9999 are no
-- tasks: they end the index range that a claim looks through.

CREATE TABLE IF NOT EXISTS t_msg_queue_high (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time, attempt)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane high: tasks to send, most urgent; msg_id 0 marks the end of an index range';

CREATE TABLE IF NOT EXISTS t_msg_queue_middle (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time, attempt)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane middle: tasks to send, ordinary; msg_id 0 marks the end of an index range';

CREATE TABLE IF NOT EXISTS t_msg_queue_low (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 1 sending, 2 unknown',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_ready (channel, status, next_time, attempt)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lane low: tasks to send, can wait; msg_id 0 marks the end of an index range';

-- History, partitioned by day. Days are split off p_future a week ahead; what is too old leaves with its partition.

CREATE TABLE IF NOT EXISTS t_msg_record (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 3 COMMENT '3 success, 4 failed, 6 expired, 7 cancelled, 8 skipped',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  finish_time      DATETIME(3)       NOT NULL COMMENT 'when the task ended (UTC); the partition key',
  provider_msg_id  VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the id that the provider gave',
  latency_ms       INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'how long the provider took over the last attempt, ms',
  PRIMARY KEY (msg_id, channel, finish_time),
  KEY idx_receiver (receiver, create_time),
  KEY idx_source (source_id, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='tasks that have ended; rows never change and never leave but with their partition'
  PARTITION BY RANGE COLUMNS (finish_time) (PARTITION p_future VALUES LESS THAN (MAXVALUE));

CREATE TABLE IF NOT EXISTS t_msg_dead (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 5 COMMENT '5 dead',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the claim that holds the task: node.boot.sequence; empty: nobody',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message was to be sent; never changed by a claim (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'ready: not before; sending: end of the lease; unknown: end of the wait (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_receiver (receiver, create_time),
  KEY idx_source (source_id, create_time),
  KEY idx_died (modify_time),
  KEY idx_category (category, channel)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='dead letters: attempts used up or outcome unknown; each waits for a person';

CREATE TABLE IF NOT EXISTS t_msg_attempt (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'as in the queue tables',
  attempt          SMALLINT UNSIGNED NOT NULL COMMENT 'which attempt, from 1',
  outcome          ENUM('temporary','permanent','unknown') NOT NULL COMMENT 'what the failure means',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked; empty: the attempt ended before one was chosen',
  code             VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the code that the provider answered with',
  text             VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what went wrong, in words',
  latency_ms       INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'how long the provider took, ms',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the node that wrote the row',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the attempt ended (UTC); the partition key',
  PRIMARY KEY (msg_id, channel, attempt, create_time),
  KEY idx_outcome (outcome, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='one row for every attempt that did not end in success; append-only'
  PARTITION BY RANGE COLUMNS (create_time) (PARTITION p_future VALUES LESS THAN (MAXVALUE));

-- Idempotency and nodes.

CREATE TABLE IF NOT EXISTS t_idempotency (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  request_hash     BINARY(32)        NOT NULL COMMENT 'SHA-256 of the request_id',
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message that the key stands for',
  body_hash        BINARY(32)        NOT NULL COMMENT 'SHA-256 of the decoded request: the same key with another body is a conflict',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'the key may be forgotten after this instant (UTC)',
  PRIMARY KEY (source_id, request_hash),
  KEY idx_expire (expire_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='one row for every message that came with a request_id, written in the transaction that accepts it';

CREATE TABLE IF NOT EXISTS t_node (
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the number inside message ids, 0 to 1023',
  boot             INT UNSIGNED      NOT NULL COMMENT 'how often the number has been taken',
  holder           VARCHAR(64)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL COMMENT 'a random name of the process that holds the number; empty: nobody',
  host             VARCHAR(255)      NOT NULL COMMENT 'the machine it runs on',
  pid              INT UNSIGNED      NOT NULL COMMENT 'its process id there',
  version          VARCHAR(64)       NOT NULL COMMENT 'its version of Tidings',
  serves           TINYINT UNSIGNED  NOT NULL DEFAULT 1 COMMENT '1: it claims and sends; 0: a command, which does not',
  start_time       DATETIME(3)       NOT NULL COMMENT 'when it took the number (UTC)',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'the number is its own until then (UTC); renewed every few seconds',
  PRIMARY KEY (node)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='leases on node numbers; a row with a holder whose lease_end lies ahead is a living process';

-- Who may send what: callers with their keys, templates with their versions, and who changed what.

CREATE TABLE IF NOT EXISTS t_source (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller, as messages name it',
  name             VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'for people to read',
  role             ENUM('sender','admin') NOT NULL DEFAULT 'sender' COMMENT 'sender: sees and sends its own; admin: sees all, and administers',
  enabled          TINYINT UNSIGNED  NOT NULL DEFAULT 1 COMMENT '0: its keys open nothing',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was registered (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when the row was last changed (UTC)',
  PRIMARY KEY (source_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='callers; while the table is empty, callers on this machine are the source default';

CREATE TABLE IF NOT EXISTS t_source_key (
  key_id           VARCHAR(16)       NOT NULL COMMENT 'the part of the key that may be shown',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that it names',
  key_hash         BINARY(32)        NOT NULL COMMENT 'SHA-256 of the key, which itself is kept nowhere',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  revoke_time      DATETIME(3)       NULL COMMENT 'when it was revoked (UTC); NULL: it is valid',
  PRIMARY KEY (key_id),
  KEY idx_source (source_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='keys of callers: at most two valid ones each, so that they can be changed without a gap';

CREATE TABLE IF NOT EXISTS t_msg_template (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that it belongs to',
  template_id      VARCHAR(64)       NOT NULL COMMENT 'its name in requests',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'the channel that this variant is for, numbered as in the queue tables',
  version          INT UNSIGNED      NOT NULL COMMENT 'from 1; what a version says never changes',
  name             VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'for people to read',
  rel_template_id  VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'its id on the platform of the provider',
  sign_name        VARCHAR(256)      NOT NULL DEFAULT '' COMMENT 'the signature that SMS providers ask for',
  subject          VARCHAR(998)      NOT NULL DEFAULT '' COMMENT 'the subject, with placeholders',
  content          MEDIUMTEXT        NOT NULL COMMENT 'the text, with placeholders such as {{username}}',
  html             MEDIUMTEXT        NOT NULL COMMENT 'the text as HTML, for e-mail; empty: none',
  category         ENUM('verification','notification','marketing') NULL COMMENT 'of messages that name none; NULL: notification',
  policy           JSON              NULL COMMENT 'what of the policy of its category is different for its messages; NULL: nothing',
  `sensitive`      TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '1: what the message said is blanked when it ends',
  status           TINYINT UNSIGNED  NOT NULL COMMENT '1 waiting for review, 2 normal, 3 rejected, 4 deleted',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the version was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when its status last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_version (source_id, template_id, channel, version)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='templates, a row for every version of every variant; messages keep the version they were accepted with';

CREATE TABLE IF NOT EXISTS t_audit (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was done (UTC)',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'who did it; command-line for the program itself',
  action           VARCHAR(64)       NOT NULL COMMENT 'what was done, such as template.update',
  object           VARCHAR(255)      NOT NULL COMMENT 'to what',
  detail           VARCHAR(1024)     NOT NULL DEFAULT '' COMMENT 'how; no content, no secrets',
  PRIMARY KEY (id),
  KEY idx_time (create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='who changed what, when: one row for every change by API or command, written with the change';

-- Limits and campaigns.

CREATE TABLE IF NOT EXISTS t_global_quota (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  num              INT UNSIGNED      NOT NULL COMMENT 'tasks that may be accepted in any unit of time, of all callers together',
  unit             BIGINT UNSIGNED   NOT NULL COMMENT 'ms: 1000 a second, 60000 a minute, 86400000 a day',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when it was last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_limit (channel, unit)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='quotas of channels; edited by hand they hold within a second, too';

CREATE TABLE IF NOT EXISTS t_source_quota (
  id               BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  num              INT UNSIGNED      NOT NULL COMMENT 'tasks of the caller that may be accepted in any unit of time',
  unit             BIGINT UNSIGNED   NOT NULL COMMENT 'ms: 1000 a second, 60000 a minute, 86400000 a day',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when it was last changed (UTC)',
  PRIMARY KEY (id),
  UNIQUE KEY idx_limit (source_id, channel, unit)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='quotas of callers; edited by hand they hold within a second, too';

CREATE TABLE IF NOT EXISTS t_limit_count (
  limit_hash       BINARY(32)        NOT NULL COMMENT 'SHA-256 of what is counted: kind, caller, channel, category, receiver and unit',
  kind             ENUM('global','source','recipient') NOT NULL COMMENT 'which kind of limit',
  source_id        VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the caller; empty: all',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  state            VARBINARY(512)    NOT NULL COMMENT 'times of the last acceptances, or counts of parts of the unit',
  version          BIGINT UNSIGNED   NOT NULL COMMENT 'counts changes: a change is made to the version that was read, or not at all',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'what the row says is over after this instant (UTC)',
  PRIMARY KEY (limit_hash),
  KEY idx_expire (expire_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='how far limits are used up; changed in the transaction that accepts a message';

CREATE TABLE IF NOT EXISTS t_batch (
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller',
  batch_id         VARCHAR(64)       NOT NULL COMMENT 'the campaign, as the caller names it',
  first_msg_id     BIGINT UNSIGNED   NOT NULL COMMENT 'its messages lie between this id',
  last_msg_id      BIGINT UNSIGNED   NOT NULL COMMENT 'and this one',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when its first message was accepted (UTC)',
  PRIMARY KEY (source_id, batch_id),
  KEY idx_time (source_id, create_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='campaigns: messages with a batch_id';

-- Scheduled sends: tasks that are due more than delay.lead ahead. A ring of tables by due time, made from t_msg_delay_far by the
-- running program; the mover takes tasks to their queue table just before they are due. What a slot's tables hold when its time is
-- over are tombstones (status 9): they are truncated, and the slot takes the next span of time.

CREATE TABLE IF NOT EXISTS t_msg_delay_far (
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the message; its top bits are the millisecond in which it was accepted',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT '1 email, 2 sms, 3 feishu, 4 inbox, 5 push, 6 webhook, 7 dingtalk, 8 wecom, 31 log',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the message in',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key that the caller gave; empty: none',
  batch_id         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the campaign that the message belongs to; empty: none',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'names the policy: retries, expiry',
  priority         ENUM('high','middle','low') NOT NULL COMMENT 'the lane, which is to say the queue table',
  receiver         VARCHAR(512)      NOT NULL COMMENT 'the address on this channel',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: content is used',
  template_version INT UNSIGNED      NOT NULL DEFAULT 0 COMMENT 'the version that the message was accepted with',
  params           JSON              NULL COMMENT 'variables of the template',
  content          JSON              NULL COMMENT 'subject, text, html, when no template is used',
  status           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '0 ready, 9 moved: the task is elsewhere, the row no task any more',
  attempt          SMALLINT UNSIGNED NOT NULL DEFAULT 0 COMMENT 'attempts so far, the running one included; never reset',
  attempt_limit    SMALLINT UNSIGNED NOT NULL COMMENT 'after this many attempts the task is a dead letter',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'who moved the task away: node.boot.sequence; empty: it is here',
  due_time         DATETIME(3)       NOT NULL COMMENT 'when the message is to be sent (UTC)',
  next_time        DATETIME(3)       NOT NULL COMMENT 'the same, for the queue table that the task moves to (UTC)',
  expire_time      DATETIME(3)       NOT NULL COMMENT 'not sent after this instant (UTC)',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'what the last attempt ended with',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the message was accepted (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when Tidings last changed the row (UTC)',
  PRIMARY KEY (msg_id, channel),
  KEY idx_due (status, due_time)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='scheduled tasks that are due after the ring, or before it is made; t_msg_delay_<slot>_<shard> are tables like this one';

CREATE TABLE IF NOT EXISTS t_delay_slot (
  slot             SMALLINT UNSIGNED NOT NULL COMMENT 'the slot: its tasks are in t_msg_delay_<slot>_<shard>; 0 is t_msg_delay_far; numbers are not used twice',
  shards           SMALLINT UNSIGNED NOT NULL COMMENT 'how many tables, from shard 0',
  state            ENUM('far','new','ready','open','closing','retired') NOT NULL COMMENT 'new: its tables are being made; ready: all processes are to know of it; open: takes tasks; closing: takes none, and is emptied; retired: its tables are dropped',
  generation       INT UNSIGNED      NOT NULL COMMENT 'how often the slot has come round: 1 is the first time; …_g<n> are the tables of a generation that is over, …_t<n> the empty ones that take their place',
  from_time        DATETIME(3)       NOT NULL COMMENT 'takes tasks that are due from this instant (UTC) …',
  to_time          DATETIME(3)       NOT NULL COMMENT '… and before this one (UTC)',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'not worked on before: somebody reads its tables; in row 0: a process turns the ring (UTC)',
  truncate_time    DATETIME(3)       NULL COMMENT 'when its tables were last truncated (UTC)',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when it was made (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when its state last changed (UTC)',
  PRIMARY KEY (slot)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='the ring of delay tables: which slot a due time belongs to';

INSERT IGNORE INTO t_delay_slot (slot, shards, state, generation, from_time, to_time, lease_end, create_time, modify_time) VALUES
  (0, 1, 'far', 0, '1000-01-01 00:00:00', '9999-12-31 00:00:00', '1000-01-01 00:00:00', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3));

-- What people steer: lanes and providers; and how each process finds its providers.

CREATE TABLE IF NOT EXISTS t_lane (
  lane             ENUM('high','middle','low') NOT NULL COMMENT 'the lane',
  weight           SMALLINT UNSIGNED NOT NULL COMMENT 'its share of free sending slots, against the other lanes that have work',
  paused           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT '1: nothing of it is sent; what expires still ends',
  reason           VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'why it is paused',
  modify_by        VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'who changed the row last',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when (UTC)',
  PRIMARY KEY (lane)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='lanes: every process obeys within a second, edited by hand, too';

INSERT IGNORE INTO t_lane (lane, weight, modify_time) VALUES ('high', 70, UTC_TIMESTAMP(3)), ('middle', 20, UTC_TIMESTAMP(3)), ('low', 10, UTC_TIMESTAMP(3));

CREATE TABLE IF NOT EXISTS t_provider_state (
  provider         VARCHAR(64)       NOT NULL COMMENT 'the name in the configuration',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the process whose view it is (t_node); 65535: what holds for all',
  paused           TINYINT UNSIGNED  NOT NULL DEFAULT 0 COMMENT 'for all: 1: it is not asked',
  reason           VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'for all: why it is paused',
  modify_by        VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'for all: who paused or resumed it',
  busy_until       DATETIME(3)       NULL COMMENT 'for all: it asked not to be asked before (UTC)',
  breaker          ENUM('closed','open','half-open') NOT NULL DEFAULT 'closed' COMMENT 'of a process: open: it fails, and is not asked; half-open: a few attempts find out',
  breaker_time     DATETIME(3)       NULL COMMENT 'of a process: since when (UTC)',
  modify_time      DATETIME(3)       NOT NULL COMMENT 'when the row was last changed (UTC)',
  PRIMARY KEY (provider, node)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='providers: pauses by hand, and what each process knows of them';

-- What people see: figures by hour, and which dead letters nobody has been told of.

CREATE TABLE IF NOT EXISTS t_stat_hour (
  hour             DATETIME          NOT NULL COMMENT 'the hour in which the tasks ended (UTC)',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the process that ended them: each adds to rows of its own',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the messages in',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: messages without a template',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'as in the queue tables',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked last; empty: none was',
  outcome          ENUM('success','failed','expired','cancelled','skipped') NOT NULL COMMENT 'how the tasks ended',
  tasks            BIGINT UNSIGNED   NOT NULL COMMENT 'how many',
  latency_ms       BIGINT UNSIGNED   NOT NULL COMMENT 'their latencies, added up: how long providers took over the last attempts, ms',
  day              DATE              AS (CAST(hour AS DATE)) VIRTUAL COMMENT 'the day of the hour (UTC)',
  PRIMARY KEY (hour, node, source_id, template_id, channel, category, provider, outcome),
  KEY idx_day (day)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='ended tasks by hour: written in the transaction that records them, so that its sum is the number of rows of t_msg_record';

CREATE TABLE IF NOT EXISTS t_attempt_hour (
  hour             DATETIME          NOT NULL COMMENT 'the hour in which the attempts ended (UTC)',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the process that made them: each adds to rows of its own',
  provider         VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'the provider asked; empty: the attempt ended before one was chosen',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  outcome          ENUM('temporary','permanent','unknown') NOT NULL COMMENT 'as in t_msg_attempt',
  attempts         BIGINT UNSIGNED   NOT NULL COMMENT 'how many',
  latency_ms       BIGINT UNSIGNED   NOT NULL COMMENT 'their latencies, added up, ms',
  PRIMARY KEY (hour, node, provider, channel, outcome)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='attempts that did not end in success, by hour: written in the transaction that logs them in t_msg_attempt';

CREATE TABLE IF NOT EXISTS t_alarm (
  level            ENUM('now','daily') NOT NULL COMMENT 'now: people are told at once; daily: in the digest',
  msg_id           BIGINT UNSIGNED   NOT NULL COMMENT 'the dead letter: its row in t_msg_dead',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  create_time      DATETIME(3)       NOT NULL COMMENT 'when the task died (UTC)',
  PRIMARY KEY (level, create_time, msg_id, channel)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='dead letters that nobody has been told of yet; a row goes when its alarm has been delivered';

CREATE TABLE IF NOT EXISTS t_alarm_level (
  level            ENUM('now','daily') NOT NULL COMMENT 'as in t_alarm',
  told_time        DATETIME(3)       NULL COMMENT 'when people were last told (UTC); NULL: never; of daily at first when the table was made',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the process that tells them now: node.boot.sequence',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'until then nobody else does (UTC)',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'why the last alarm was not delivered; empty: it was',
  PRIMARY KEY (level)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='alarms: when people were last told, and who is about to tell them';

INSERT IGNORE INTO t_alarm_level (level, told_time, lease_end) VALUES ('now', NULL, UTC_TIMESTAMP(3)), ('daily', UTC_TIMESTAMP(3), UTC_TIMESTAMP(3));

-- SQL intake: a service on the same server inserts a request here within its own transaction. What it may fill in: source_id to
-- expire_time. One process at a time takes the rows, as requests by HTTP are taken; the outcome is written in the transaction that
-- accepts the message.

CREATE TABLE IF NOT EXISTS t_msg_submit (
  submit_id        BIGINT UNSIGNED   NOT NULL AUTO_INCREMENT COMMENT 'the row',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller, as in t_source; default while no caller is registered',
  request_id       VARCHAR(255)      NOT NULL DEFAULT '' COMMENT 'the key of the message, the same as by HTTP; empty: submit-<submit_id>',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'a template, instead of content',
  channels         VARCHAR(255)      NOT NULL COMMENT 'the channels to send over, with commas between them: email,sms',
  priority         VARCHAR(16)       NOT NULL DEFAULT '' COMMENT 'high, middle or low; empty: the category''s',
  category         VARCHAR(16)       NOT NULL DEFAULT '' COMMENT 'verification, notification or marketing; empty: the template''s, or notification',
  receiver         VARCHAR(2048)     NOT NULL COMMENT 'an address, or a JSON object with an address for each channel',
  params           JSON              NULL COMMENT 'the template''s variables, an object; NULL again when the message is accepted',
  content          JSON              NULL COMMENT 'an object: subject, text, html, attachments, as by HTTP; NULL again when the message is accepted',
  send_at          DATETIME(3)       NULL COMMENT 'not sent before (UTC); NULL: at once',
  expire_time      DATETIME(3)       NULL COMMENT 'not sent after (UTC); NULL: as the category says, from send_at or create_time on',
  status           ENUM('new','accepted','rejected') NOT NULL DEFAULT 'new' COMMENT 'new: not taken yet; rejected: see error; set to new again it is tried again',
  msg_id           BIGINT UNSIGNED   NULL COMMENT 'the message that it became, or that its key stood for already',
  error            VARCHAR(1024)     NOT NULL DEFAULT '' COMMENT 'rejected: what is wrong with it; new: why it waits',
  create_time      DATETIME(3)       NOT NULL DEFAULT (UTC_TIMESTAMP(3)) COMMENT 'when it was inserted (UTC)',
  next_time        DATETIME(3)       NOT NULL DEFAULT '1000-01-01 00:00:00.000' COMMENT 'new: not tried before; else: since when it has been accepted or rejected (UTC)',
  PRIMARY KEY (submit_id),
  KEY idx_status (status, next_time),
  KEY idx_request (source_id, request_id)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='requests by SQL: an outbox in the caller''s own transaction';

-- What one process does for all.

CREATE TABLE IF NOT EXISTS t_duty (
  duty             VARCHAR(32)       NOT NULL COMMENT 'submit: takes requests from t_msg_submit; retention: drops what is too old',
  owner            VARCHAR(48)       CHARACTER SET ascii COLLATE ascii_bin NOT NULL DEFAULT '' COMMENT 'the process that does it: node.boot.sequence; empty: nobody',
  lease_end        DATETIME(3)       NOT NULL COMMENT 'until then nobody else does (UTC)',
  done_time        DATETIME(3)       NULL COMMENT 'when it was last done to its end (UTC); NULL: never',
  last_error       VARCHAR(512)      NOT NULL DEFAULT '' COMMENT 'why it could not be done; empty: it could',
  PRIMARY KEY (duty)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='work that one process does for all, and which one';

INSERT IGNORE INTO t_duty (duty, lease_end) VALUES ('submit', UTC_TIMESTAMP(3)), ('retention', UTC_TIMESTAMP(3));

-- One row a lane and channel to end the index range.

INSERT IGNORE INTO t_msg_queue_high
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'high', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

INSERT IGNORE INTO t_msg_queue_middle
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'middle', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

INSERT IGNORE INTO t_msg_queue_low
  (msg_id, channel, source_id, category, priority, receiver, attempt_limit, due_time, next_time, expire_time, create_time, modify_time) VALUES
  (0, 1, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 2, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 3, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 4, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 5, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 6, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 7, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 8, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00'),
  (0, 31, '', 'notification', 'low', '', 0, '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00', '9999-12-31 00:00:00');

-- Views for people. Channels and states are words, times are UTC, sentinels and tombstones are left out, and none of them locks anything. Of each
-- the index is named that keeps it cheap. Who looks needs the right to read the tables; whose account made a view does not matter.
--
-- v_delay: the tasks in all delay tables (primary key, or idx_due for a due_time). v_scheduled_by_hour: how many are due in which hour
-- (idx_due, all of it; an hour's rows: ask v_delay with a due_time). v_batch: how far each batch is (give it source_id and batch_id: then the
-- primary keys, from the batch's first message to its last). These three are made anew when the ring's tables change.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_delay AS
  SELECT 't_msg_delay_far' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time FROM t_msg_delay_far WHERE status = 0;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_scheduled_by_hour AS
  SELECT due_hour, SUM(tasks) AS tasks FROM (
    SELECT FROM_DAYS(TO_DAYS(due_time)) + INTERVAL HOUR(due_time) HOUR AS due_hour, COUNT(*) AS tasks FROM t_msg_delay_far WHERE status = 0 GROUP BY due_hour
  ) AS counted GROUP BY due_hour;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_batch AS
  SELECT source_id, batch_id, create_time, SUM(tasks) AS tasks, SUM(IF(status = 0, tasks, 0)) AS `ready`, SUM(IF(status = 1, tasks, 0)) AS `sending`, SUM(IF(status = 2, tasks, 0)) AS `unknown`, SUM(IF(status = 3, tasks, 0)) AS `success`, SUM(IF(status = 4, tasks, 0)) AS `failed`, SUM(IF(status = 5, tasks, 0)) AS `dead`, SUM(IF(status = 6, tasks, 0)) AS `expired`, SUM(IF(status = 7, tasks, 0)) AS `cancelled`, SUM(IF(status = 8, tasks, 0)) AS `skipped` FROM (
    SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_high AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_middle AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_queue_low AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_delay_far AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id AND t.status = 0 GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_dead AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
    UNION ALL SELECT b.source_id, b.batch_id, b.create_time, t.status, COUNT(*) AS tasks FROM t_batch AS b STRAIGHT_JOIN t_msg_record AS t ON t.msg_id BETWEEN b.first_msg_id AND b.last_msg_id AND t.batch_id = b.batch_id AND t.source_id = b.source_id GROUP BY b.source_id, b.batch_id, b.create_time, t.status
  ) AS counted GROUP BY source_id, batch_id, create_time;

-- Each message is read over all places at once, so that a task that moves is seen once.
-- v_task: every task wherever it is. v_message: one row a message with its derived status. v_attempt: every attempt, the successful one
-- included. All by primary key: give them a msg_id.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_task AS
  SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_high WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_middle WHERE msg_id > 0
  UNION ALL SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_queue_low WHERE msg_id > 0
  UNION ALL SELECT place, msg_id, channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM v_delay
  UNION ALL SELECT 't_msg_dead' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, NULL AS finish_time, '' AS provider_msg_id FROM t_msg_dead
  UNION ALL SELECT 't_msg_record' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, request_id, batch_id, category, priority, receiver, template_id, template_version, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, attempt, attempt_limit, owner, due_time, next_time, expire_time, provider, last_error, create_time, modify_time, finish_time, provider_msg_id FROM t_msg_record;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_message AS
  SELECT msg_id, MIN(source_id) AS source_id, MIN(request_id) AS request_id,
    CASE
      WHEN SUM(status IN ('sending', 'unknown') OR (status = 'ready' AND attempt > 0)) > 0 THEN 'sending'
      WHEN SUM(status = 'ready') > 0 THEN IF(MIN(IF(status = 'ready', due_time, NULL)) > UTC_TIMESTAMP(3), 'scheduled', 'dispatched')
      WHEN SUM(status <> 'skipped') = 0 THEN 'skipped'
      WHEN SUM(status = 'success') = SUM(status <> 'skipped') THEN 'success'
      WHEN SUM(status = 'success') > 0 THEN 'partial'
      WHEN SUM(status = 'cancelled') = SUM(status <> 'skipped') THEN 'cancelled'
      WHEN SUM(status = 'expired') = SUM(status <> 'skipped') THEN 'expired'
      ELSE 'failed'
    END AS status,
    COUNT(*) AS tasks, MIN(create_time) AS create_time, MIN(due_time) AS due_time, MAX(finish_time) AS finish_time
  FROM v_task GROUP BY msg_id;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_attempt AS
  SELECT msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, attempt, outcome, provider, code, text, latency_ms, node, create_time FROM t_msg_attempt
  UNION ALL SELECT msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, attempt, 'success', provider, provider_msg_id, '', latency_ms, NULL, finish_time FROM t_msg_record WHERE status = 3;

-- v_queue: what waits, by lane and channel (idx_ready, all of it): ready: may be sent now; waiting: not due yet; retrying: between two
-- attempts; oldest_s: for how many seconds the first of the ready could have been sent.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_queue AS
  SELECT lane, IF(counted.channel = 31, 'log', ELT(counted.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(queued) - SUM(later) AS ready, SUM(later) - SUM(retrying) AS waiting, SUM(retrying) AS retrying, SUM(sending) AS sending, SUM(unknown) AS unknown,
    COALESCE(GREATEST(TIMESTAMPDIFF(SECOND, MIN(first_time), UTC_TIMESTAMP(3)), 0), 0) AS oldest_s, MIN(next_due) AS next_due FROM (
    SELECT 'high' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'high', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
    UNION ALL SELECT 'middle' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'middle', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
    UNION ALL SELECT 'low' AS lane, channel, IF(status = 0, COUNT(*), 0) AS queued, 0 AS later, 0 AS retrying, IF(status = 1, COUNT(*), 0) AS sending, IF(status = 2, COUNT(*), 0) AS unknown,
      IF(status = 0, MIN(next_time), NULL) AS first_time, NULL AS next_due FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE msg_id > 0 GROUP BY channel, status
    UNION ALL SELECT 'low', channel, 0, COUNT(*), SUM(attempt > 0), 0, 0, NULL, MIN(next_time) FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time > UTC_TIMESTAMP(3) AND next_time < '9000-01-01' GROUP BY channel
  ) AS counted GROUP BY lane, counted.channel;

-- v_stuck: tasks that should have moved and have not (idx_ready and idx_due), at most 1,000 of each kind in each table.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_stuck AS
  (SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_high' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_high FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_middle' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_middle FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'its lease or its wait has ended, and nobody took it over' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status IN (1, 2) AND next_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000)
  UNION ALL (SELECT 't_msg_queue_low' AS place, msg_id, IF(channel = 31, 'log', ELT(channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, source_id, ELT(status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, 'it has been due for more than 10 minutes' AS why, next_time AS since, attempt, owner, provider, last_error FROM t_msg_queue_low FORCE INDEX (idx_ready) WHERE channel IN (1, 2, 3, 4, 5, 6, 7, 8, 31) AND status = 0 AND next_time < UTC_TIMESTAMP(3) - INTERVAL 10 MINUTE LIMIT 1000)
  UNION ALL (SELECT place, msg_id, channel, source_id, status, 'it is due, and was not moved to its queue', due_time, attempt, owner, provider, last_error FROM v_delay WHERE due_time < UTC_TIMESTAMP(3) - INTERVAL 1 MINUTE LIMIT 1000);

-- v_dead_by_reason: dead letters by what went wrong (all of t_msg_dead); words of six letters and more with a digit in them are left out.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_dead_by_reason AS
  SELECT category, IF(t_msg_dead.channel = 31, 'log', ELT(t_msg_dead.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, provider, REGEXP_REPLACE(last_error, '(?=[0-9A-Za-z_.:-]{6})[A-Za-z_.:-]*[0-9][0-9A-Za-z_.:-]*', '…') AS reason, COUNT(*) AS tasks, MIN(modify_time) AS first_time, MAX(modify_time) AS last_time,
    MAX(msg_id) AS example_msg_id FROM t_msg_dead GROUP BY category, t_msg_dead.channel, provider, reason;

-- v_provider_hour: how each provider does, by hour (primary keys, which begin with the hour; of successes and failed attempts alike).
-- v_source_day: how many messages of a source and template reached their receivers, by day (idx_day). What is skipped or cancelled does not count.

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_provider_hour AS
  SELECT hour, provider, IF(attempts_made.channel = 31, 'log', ELT(attempts_made.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(success) AS success, SUM(temporary) AS temporary, SUM(permanent) AS permanent, SUM(unknown) AS unknown,
    ROUND(100 * SUM(success) / NULLIF(SUM(success + temporary + permanent + unknown), 0), 1) AS success_percent, ROUND(SUM(latency_ms) / NULLIF(SUM(success + temporary + permanent + unknown), 0)) AS latency_ms FROM (
    SELECT hour, provider, channel, tasks AS success, 0 AS temporary, 0 AS permanent, 0 AS unknown, latency_ms FROM t_stat_hour WHERE outcome = 'success'
    UNION ALL SELECT hour, provider, channel, 0, IF(outcome = 'temporary', attempts, 0), IF(outcome = 'permanent', attempts, 0), IF(outcome = 'unknown', attempts, 0), latency_ms FROM t_attempt_hour
  ) AS attempts_made GROUP BY hour, provider, attempts_made.channel;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_source_day AS
  SELECT day, source_id, template_id, IF(t_stat_hour.channel = 31, 'log', ELT(t_stat_hour.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, SUM(tasks) AS tasks, SUM(IF(outcome = 'success', tasks, 0)) AS success, SUM(IF(outcome = 'failed', tasks, 0)) AS failed, SUM(IF(outcome = 'expired', tasks, 0)) AS expired, SUM(IF(outcome = 'cancelled', tasks, 0)) AS cancelled, SUM(IF(outcome = 'skipped', tasks, 0)) AS skipped,
    ROUND(100 * SUM(IF(outcome = 'success', tasks, 0)) / NULLIF(SUM(IF(outcome IN ('success', 'failed', 'expired'), tasks, 0)), 0), 1) AS reach_percent,
    ROUND(SUM(IF(outcome = 'success', latency_ms, 0)) / NULLIF(SUM(IF(outcome = 'success', tasks, 0)), 0)) AS latency_ms
  FROM t_stat_hour GROUP BY day, source_id, template_id, t_stat_hour.channel;

-- v_duplicates: tasks that may have been delivered twice: nobody knows how an attempt ended, and another followed. (Give it an
-- unknown_time: idx_outcome in the partition of that day, and then the primary key of t_msg_record.)

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_duplicates AS
  SELECT a.msg_id, IF(a.channel = 31, 'log', ELT(a.channel, 'email', 'sms', 'feishu', 'inbox', 'push', 'webhook', 'dingtalk', 'wecom')) AS channel, a.attempt AS unknown_attempt, a.provider, a.text, a.create_time AS unknown_time, r.attempt AS attempts, ELT(r.status + 1, 'ready', 'sending', 'unknown', 'success', 'failed', 'dead', 'expired', 'cancelled', 'skipped') AS status, r.provider AS last_provider, r.finish_time
  FROM t_msg_attempt AS a JOIN t_msg_record AS r ON r.msg_id = a.msg_id AND r.channel = a.channel AND r.finish_time >= a.create_time
  WHERE a.outcome = 'unknown' AND r.attempt > a.attempt;

-- v_nodes: the processes. v_lanes: the lanes. (A few rows each.)

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_nodes AS
  SELECT node, CASE WHEN holder = '' THEN 'left' WHEN lease_end > UTC_TIMESTAMP(3) THEN 'alive' ELSE 'gone' END AS status, IF(serves = 1, 'serve', 'command') AS role, host, pid, version, boot, start_time, lease_end FROM t_node;

CREATE OR REPLACE SQL SECURITY INVOKER VIEW v_lanes AS
  SELECT lane, IF(paused = 1, 'paused', 'running') AS status, weight, reason, modify_by, modify_time FROM t_lane;
