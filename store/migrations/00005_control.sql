-- +goose NO TRANSACTION
-- +goose Up
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

-- A column is added once, however often this is run: MySQL has no ADD COLUMN IF NOT EXISTS.
SET @tidings_ddl = IF((SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 't_msg_template' AND column_name = 'policy') = 0,
  'ALTER TABLE t_msg_template ADD COLUMN policy JSON NULL COMMENT ''what of the policy of its category is different for its messages; NULL: nothing'' AFTER category', 'DO 0');

PREPARE tidings_ddl FROM @tidings_ddl;

EXECUTE tidings_ddl;

DEALLOCATE PREPARE tidings_ddl;
