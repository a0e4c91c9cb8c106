-- +goose NO TRANSACTION
-- +goose Up
-- What people see: figures by hour, dead letters in the order in which they died, and which of them nobody has been told of.

CREATE TABLE IF NOT EXISTS t_stat_hour (
  hour             DATETIME          NOT NULL COMMENT 'the hour in which the tasks ended (UTC)',
  node             SMALLINT UNSIGNED NOT NULL COMMENT 'the process that ended them: each adds to rows of its own',
  source_id        VARCHAR(64)       NOT NULL COMMENT 'the caller that sent the messages in',
  template_id      VARCHAR(64)       NOT NULL DEFAULT '' COMMENT 'empty: messages without a template',
  channel          TINYINT UNSIGNED  NOT NULL COMMENT 'numbered as in the queue tables',
  category         ENUM('verification','notification','marketing') NOT NULL COMMENT 'as in the queue tables',
  outcome          ENUM('success','failed','expired','cancelled','skipped') NOT NULL COMMENT 'how the tasks ended',
  tasks            BIGINT UNSIGNED   NOT NULL COMMENT 'how many',
  latency_ms       BIGINT UNSIGNED   NOT NULL COMMENT 'their latencies, added up: how long providers took over the last attempts, ms',
  PRIMARY KEY (hour, node, source_id, template_id, channel, category, outcome)
) ENGINE=InnoDB DEFAULT CHARSET=utf8mb4 COLLATE=utf8mb4_bin COMMENT='ended tasks by hour: written in the transaction that records them, so that its sum is the number of rows of t_msg_record';

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

-- An index is added once, however often this is run: MySQL has no ADD INDEX IF NOT EXISTS.
SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.statistics WHERE table_schema = DATABASE() AND table_name = 't_msg_dead' AND index_name = 'idx_died') = 0,
  'ALTER TABLE t_msg_dead ADD KEY idx_died (modify_time), ADD KEY idx_category (category, channel)', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;

-- Commands take node numbers, too, but no share of the work.
SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 't_node' AND column_name = 'serves') = 0,
  'ALTER TABLE t_node ADD COLUMN serves TINYINT UNSIGNED NOT NULL DEFAULT 1 COMMENT ''1: it claims and sends; 0: a command, which does not'' AFTER version', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;
